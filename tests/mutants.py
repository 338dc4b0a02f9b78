"""Mutants of what protects somebody: each is one changed line that a test has to notice. ``make mutants``.

Prints a line for each and ends with code 1 where one survives. They are tried in a copy of the last commit. Words in
the command line choose those whose file holds one of them: ``python tests/mutants.py versions forget``.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
JOINING, STATISTICS = "fedecider/cross_silo/joining.py", "fedecider/evaluation/statistics.py"
IFEDREC, SELECTION = "embedding_fr/methods/ifedrec.py", "fedecider/cross_silo/hyperparameter_selection.py"
MANIFEST, VERSIONS, SCRATCH = "fedecider/running/manifest.py", "fedecider/models/versions.py", "fedecider/scratch.py"
FORGET, SECURE = "fedecider/lifecycle/forget.py", "fedecider/deployment/secure.py"
ROUNDS, ROWS = "fedecider/federation/secure_rounds.py", "fedecider/methods/rows.py"
ENSEMBLES, SERVER = "fedecider/cross_silo/ensembles.py", "fedecider/deployment/server.py"
SITES, SOURCE = "fedecider/data/sites.py", "fedecider/models/source.py"
FLARE, DEPLOY = "fedecider/deployment/flare.py", "fedecider/deployment/commands.py"


class Mutant(NamedTuple):
    file: str
    line: str
    """A part of it, which stands once in the file."""
    changed: str
    tests: str


def several(tests, *changes):
    return [Mutant(*change, tests) for change in changes]


MUTANTS = [
    *several(
        "tests/test_joining.py",
        (JOINING, 'place_U in joined.whole["valid"]', 'place_U in joined.whole["test"]'),
        (JOINING, '_gains(local.whole["valid"][name])]', '_gains(local.whole["test"][name])]'),
        (JOINING, "[_gains(place_U)], ONE_SIDED)", "[_gains(place_U)], 0.0)"),
        (JOINING, "halved > alone else", "halved < alone else"),
        (JOINING, "lambda name: of_client[name].model_of", 'lambda name: systems["joined"].model_of'),
        (JOINING, '(_gains(system.whole["valid"][name]).mean()', '(_gains(system.whole["test"][name]).mean()'),
        (STATISTICS, "ONE_SIDED = 1.645", "ONE_SIDED = 1.282"),
        (STATISTICS, "one_U.var(ddof=1)", "one_U.var(ddof=0)"),
    ),
    *several(
        "tests/embedding_fr/test_ifedrec.py",
        (IFEDREC, "in range(config.server_epochs)", "in range(1)"),
        (IFEDREC, '@ row_JD.T + own["scorer.0.bias"]', "@ row_JD.T"),
    ),
    Mutant(SELECTION, "max(gains_R, key=_macro)", "gains_R[-1]", "tests/test_hyperparameter_selection.py"),
    Mutant(
        "embedding_fr/leaderboard.py",
        "patience = 0 if self.as_published else min(",
        "patience = min(",
        "tests/test_embedding_run.py -k protocol_of_papers",
    ),
    *several(
        "tests/test_manifest.py tests/test_versions.py -m 'not whole'",
        (MANIFEST, "if file_sha256(root / name) != manifest.files[name]:", "if False:"),
        (MANIFEST, "if name not in present:", "if False:"),
        (MANIFEST, "if name not in wanted:", "if False:"),
        (MANIFEST, '"per_user.parquet", "examples.json", "report.html")', '"per_user.parquet", "examples.json")'),
        (MANIFEST, 'if content.pop("checksum", "") != content_key(content):', 'if not content.pop("checksum"):'),
        (MANIFEST, "words[2:] if words[0] == SEEDS else words", "words"),
        (VERSIONS, "if number not in folders]:", "if False]:"),
        (VERSIONS, "versions=tuple(_usable(home, number))", "versions=()"),
        (VERSIONS, "and (oldest / name).is_file()]", "and False]"),
        (VERSIONS, "        remove_left(home, alone=True)\n", ""),
        (VERSIONS, "if one.forgets and number <= in_force), default=1)", "if False), default=1)"),
        (SCRATCH, "else not _is_alive(int(process))", "else True"),
        (SCRATCH, "> ABANDONED_S", "> 0.0"),
        (SCRATCH, "left = alone if", "left = True if"),
    ),
    *several(
        "tests/test_manifest.py -k lost_file",
        (MANIFEST, " or (root / VERSIONS).is_dir():", ":"),
        (SOURCE, "parts if private or ensemble else parts[:3])", "parts[:3])"),
        (SOURCE, "        manifest.refuse_lost(folder)\n", ""),
    ),
    *several(
        "tests/test_forget.py",
        (FORGET, ".filter(~theirs)", ""),
        (FORGET, "elif not file.is_relative_to(folder.private):", "elif False:"),
    ),
    Mutant(SOURCE, "if (root / manifest.MANIFEST_FILE).is_file():", "if False:", "tests/test_recommender_folders.py"),
    *several(
        "tests/methods/test_parts_of_tables.py tests/deployment/test_secure_deployed.py",
        (ROUNDS, "        sums.check_all(round, survivors)\n", ""),
        (ROUNDS, "and len(clients) < num_clients:", "and len(clients) < num_clients - 1:"),
        (SECURE, "        self.sums.check_all(asked.round, clients)\n", ""),
        (SECURE, "        assert rules is not None\n        self.sums.check_all(round, survivors)\n", ""),
        (ROWS, "threshold=1.0 if sell_parts else THRESHOLD", "threshold=THRESHOLD"),
        (ROWS, "if participation < 1.0 and sell_parts:", "if False:"),
    ),
    *several(
        "tests/deployment/test_flare.py tests/deployment/test_flare_hostile.py -m 'not slow'",
        (FLARE, "new_secure_session(ADMIN, str(kit.absolute()))", "Session(ADMIN, str(kit.absolute()), False)"),
        (FLARE, "import Session, new_secure_session", "import Session, new_insecure_session as new_secure_session"),
        (FLARE, "    check_certificate(kit, ADMIN)\n", ""),
        (FLARE, '(name not in ("", owner),', "(False,"),
        (FLARE, "(not issued,", "(False,"),
        (FLARE, "not begins <= datetime.now(timezone.utc) <= ends", "False"),
        (FLARE, "if sender == name:", "if True:"),
        (FLARE, "ends = time.monotonic() + deadline_s if", "ends = time.time() + deadline_s if"),
        (DEPLOY, 'of_site if kind == "site" else ""', '""'),
    ),
    *several(
        "tests/deployment/test_deployed.py -k figures",
        (SERVER, "_is_difference if row == DIFFERENCE else _is_figure", "_is_difference"),
        (SERVER, "and -1.0 - 1e-9 <= value <= 1.0 + 1e-9", ""),
        (SERVER, "-1e-9 <= value <= 1.0 + 1e-9  #", "True  #"),
    ),
    Mutant(
        SERVER,
        "if not all(map(_is_figure, values)):",
        "if False:",
        "tests/deployment/test_deployed_faults.py -k believed",
    ),
    Mutant(
        "fedecider/testing/llm_contract.py",
        "(~(logit_BV <= logit_BV.gather(1, target_B[:, None])))",
        "(logit_BV > logit_BV.gather(1, target_B[:, None]))",
        "tests/methods/test_contract.py -k no_numbers",
    ),
    Mutant(
        ENSEMBLES,
        'asked = (histories(sequences, "valid"), targets(sequences, "valid"))',
        'asked = (histories(sequences, "test"), targets(sequences, "test"))',
        "tests/ensemble/test_sources.py",
    ),
    Mutant(
        "idgen/backbone_training.py",
        "[task.without_last(user_U) for task, user_U in pairs]",
        "[task for task, _ in pairs]",
        "tests/idgen/test_validation.py",
    ),
    *several(
        "tests/deployment/test_site_tables.py",
        (SITES, "if missing else", "if False else"),
        (SITES, "[number_of[key] for key in own.own_keys]", "[*range(len(own.own_keys))]"),
    ),
]


def tried(mutant: Mutant, folder: Path) -> bool:
    """Whether it survives."""
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    assert text.count(mutant.line) == 1, f"{mutant.file}: {mutant.line!r} stands {text.count(mutant.line)} times"
    path.write_text(text.replace(mutant.line, mutant.changed), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", *shlex.split(mutant.tests)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    path.write_text(text, encoding="utf-8")
    assert done.returncode in (0, 1), done.stdout[-2000:]
    return done.returncode == 0


def main(words: list[str]) -> int:
    chosen = [one for one in MUTANTS if not words or any(word in one.file for word in words)]
    survivors = 0
    with tempfile.TemporaryDirectory() as place:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=REPOSITORY, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", place], input=archive, check=True)
        for one in chosen:
            survives = tried(one, Path(place))
            survivors += survives
            shown = one.changed.strip() or f"without {one.line.strip()}"
            print(f"{'SURVIVES' if survives else 'dies'}  {one.file}: {shown}", flush=True)
    print(f"{len(chosen)} mutants, {survivors} survive")
    return int(survivors > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
