"""What a site's auditor sees on one page: every kind of message that left, which files hold customers' data, and what a
server could infer of purchases."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from fedecider.audit.attacks import AuditConfig
from fedecider.audit.membership import STATISTICS
from fedecider.cross_silo.audit import View, ask, drawn, is_pair, known_of, view_row
from fedecider.deployment.llm import own_domain, party
from fedecider.deployment.messages import DeploymentConfig, own_upload, to_download, unpack
from fedecider.deployment.project import read_project
from fedecider.deployment.site import HELD_FILE, LEFT_FILE
from fedecider.evaluation.protocols import histories, targets, train_parts, with_target
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.method import Tree
from fedecider.federation.record import read_records
from fedecider.federation.wire import take_row
from fedecider.report.tables import interval_text
from fedecider.running.damage import damage_names
from fedecider.running.launch import Launch
from fedecider.running.manifest import read_manifest
from fedecider.running.run_folder import SENT_FILE, read_run


def site_in_words(folder: Path) -> list[str]:
    """What left, and which files hold customers' data, line by line.

    Raises:
        ValueError: the site did not finish, or a file is damaged.
    """
    customers, path = read_manifest(folder).customers, folder / LEFT_FILE
    records = read_records(path) if path.is_file() else []
    lines = [f"left this site: {len(records)} messages, {path}"]
    with damage_names(path):
        for kind in dict.fromkeys(one["kind"] for one in records):
            mine = [one for one in records if one["kind"] == kind]
            rounds, size = [one["round"] for one in mine], sum(one["bytes"] for one in mine)
            shapes = [f"{name} {'x'.join(map(str, shape))}" for name, shape in mine[-1]["tensors"].items()]
            shown = ", ".join([*shapes, *mine[-1]["facts"]]) or "nothing more"
            lines.append(f"{kind}: {len(mine)} in rounds {min(rounds)} to {max(rounds)}, {size:,} bytes: {shown}")
    for name in customers:
        readable = (folder / name).parent.stat().st_mode & 0o077 and (folder / name).stat().st_mode & 0o044
        who = "others may read it: chmod 600" if readable else "its owner alone reads it"
        lines.append(f"holds customers' data: {name}, {who}")
    return lines


def inferred_in_words(config: AuditConfig, launch: Launch) -> list[str]:
    """How well the models in the last messages tell purchases that a site trained on from others, line by line.

    The attack is that of `fedecider.cross_silo.audit`, on purchases instead of customers: a site has no customers on
    whom it did not train. Of each customer the newest train event (U,) is a member, and the test event, of a basket its
    first, another. That this one is later may tell them apart by itself: the student's figure says how well.

    Raises:
        ValueError: the project or the data of the site are not where it had them, or are other ones.
    """
    root, most = Path(config.run), DeploymentConfig().max_bytes
    run = read_run(root)["config"]["run"]
    name, project = run["domains"], read_project(Path(run["cache"]).parent)
    domain = own_domain(project, config.data or run["data"], name)
    models, client = party(project, {name: domain}, launch.device).recommender, project.names.index(name)
    start = models.start
    rows = SequenceArray.of(domain.clients.sequences)
    tested = rows.take(with_target(rows, "test"))
    ends = zip(histories(tested, "test"), targets(tested, "test"), strict=True)
    parts = list(train_parts(rows)), [[*past, basket[0]] for past, basket in ends]
    members, others = (drawn(config, part, name) for part in parts)
    asked = ask(replace(config, num_events=1), models, (members, others), client)
    lines = [
        f"attack: did {name} train on a purchase? {asked.num_members} newest train purchases of its customers against "
        f"{asked.num_others} held-out ones; guessing has AUC 0.5 and TPR 0.01; 95 % intervals"
    ]

    def attack(party: str, sees: str, seen: Tree, statistic: str = STATISTICS[0]) -> None:
        pair = {key: seen[key] for key in start}
        view = View(party, sees, lambda _: models.model(client, pair), (1.0,), (statistic,))
        row = view_row(config, {name: asked}, view)
        area, rate = interval_text(row.auc, 3), interval_text(row.true_positives, 3)
        lines.append(f"{party}, from {sees}: AUC {area}, TPR at 1 % FPR {rate}")

    attack("nobody", "the shared student alone", start, STATISTICS[-1])
    download = known_of(to_download(unpack((root / HELD_FILE).read_bytes(), most), most))
    blob = (root / SENT_FILE).read_bytes() if (root / SENT_FILE).is_file() else b""
    if project.settings.run.secure_sum:
        number = len(project.names)
        lines.append(f"uploads of {name} left masked: the server reads none of them, only the sum over {number} sites")
    elif blob and is_pair(upload := {**download, **take_row(own_upload(unpack(blob, most), most).tensors, 0)}, start):
        sees = f"the upload of round {unpack(blob, most).round} (SHA-256 {sha256(blob).hexdigest()[:16]})"
        attack("server", sees, upload)
    else:
        lines.append(f"no upload of {name} is kept here that this attack could use")
    if is_pair(download, start):
        attack("server and all sites", "the mean of all sites, which came last", download)
    return [*lines, "a low AUC says that this attack found nothing, not that nothing is there: docs/privacy.md"]
