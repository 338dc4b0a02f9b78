"""Word lists of the embedded sample: themes that exist in every domain, and what is particular to each domain."""

from __future__ import annotations

THEMES: dict[str, tuple[str, ...]] = {
    "space": ("comet", "planet", "rocket", "orbit", "galaxy", "meteor", "moon", "star"),
    "magic": ("wizard", "spell", "dragon", "wand", "potion", "witch", "charm", "curse"),
    "sea": ("harbor", "island", "pirate", "anchor", "whale", "tide", "lighthouse", "coral"),
    "ghosts": ("phantom", "manor", "crypt", "shadow", "raven", "grave", "spirit", "haunting"),
    "machines": ("robot", "engine", "circuit", "clockwork", "piston", "signal", "machine", "gear"),
    "winter": ("glacier", "blizzard", "frost", "icicle", "sled", "snow", "avalanche", "tundra"),
    "jungle": ("tiger", "jaguar", "vine", "temple", "parrot", "canopy", "river", "orchid"),
    "music": ("violin", "opera", "drum", "piano", "melody", "trumpet", "choir", "ballad"),
    "desert": ("camel", "dune", "oasis", "caravan", "scorpion", "mirage", "cactus", "nomad"),
    "kitchen": ("baker", "honey", "pepper", "kettle", "feast", "recipe", "cinnamon", "saffron"),
    "railway": ("train", "station", "tunnel", "locomotive", "platform", "conductor", "freight", "viaduct"),
    "circus": ("clown", "acrobat", "trapeze", "juggler", "tent", "ringmaster", "carousel", "stilts"),
    "mountain": ("summit", "cliff", "climber", "ridge", "valley", "eagle", "cabin", "boulder"),
    "castle": ("knight", "tower", "throne", "moat", "sword", "crown", "dungeon", "banner"),
    "library": ("archive", "manuscript", "scholar", "ink", "atlas", "parchment", "librarian", "riddle"),
    "farm": ("barn", "harvest", "tractor", "meadow", "plough", "rooster", "windmill", "haystack"),
    "weather": ("storm", "thunder", "rainbow", "hurricane", "lightning", "cloud", "drizzle", "fog"),
    "jewels": ("diamond", "ruby", "sapphire", "pearl", "necklace", "topaz", "opal", "garnet"),
}
"""Theme -> its nouns. The same words occur in all domains: they are what the domains share."""

_ADJECTIVES = (
    "silver golden broken silent hidden crimson burning lonely ancient electric forgotten midnight velvet wandering "
    "bitter emerald restless hollow scarlet frozen whispering crooked distant amber"
)
ADJECTIVES = _ADJECTIVES.split()

DOMAIN_WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "crime": {
        "label": ("Mystery", "Thriller", "Crime"),
        "series": ("Murders", "Investigations", "Casebook", "Inquests", "Suspects", "Alibis"),
        "volume": ("Verdict", "Witness", "Alibi", "Motive", "Confession", "Clue", "Suspect", "Trial"),
        "hero": ("a tired detective", "a retired judge", "a young reporter", "a stubborn inspector"),
        "deed": ("hunts a killer", "reopens a cold case", "doubts a confession", "follows a stolen letter"),
    },
    "comics": {
        "label": ("Comics", "Graphic Novels", "Manga"),
        "series": ("Avengers", "Squad", "Legends", "Guardians", "Rebels", "Outlaws"),
        "volume": ("Showdown", "Origin", "Rivals", "Uprising", "Mask", "Battle", "Escape", "Arena"),
        "hero": ("a masked hero", "a rookie sidekick", "a fallen champion", "a runaway mutant"),
        "deed": ("fights a tyrant", "defends the city", "loses a strange power", "joins a secret team"),
    },
    "children": {
        "label": ("Children", "Picture Books", "Early Readers"),
        "series": ("Kittens", "Puppies", "Friends", "Bunnies", "Adventures", "Playmates"),
        "volume": ("Picnic", "Birthday", "Surprise", "Secret", "Sleepover", "Parade", "Garden", "Lullaby"),
        "hero": ("a curious kitten", "a shy bear", "a brave girl", "a clumsy rabbit"),
        "deed": ("learns to share", "finds a new friend", "gets lost at the fair", "plans a party"),
    },
}
"""Domain -> words that only this domain uses."""
