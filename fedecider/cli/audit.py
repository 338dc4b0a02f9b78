"""What the server or another client can infer from what it sees: python scripts/audit.py --run runs/x."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedecider.audit.attacks import AuditConfig
from fedecider.engine.track import track_of_config
from fedecider.running.command import run
from fedecider.running.options import parse

DESCRIPTION = """Attack a finished run as the server or another client could. Cross-device track: which items did a
client train on? Cross-silo track: which users did it train on? Writes audit.json into the output directory and prints a
table; for the page of a run of the cross-silo track, run scripts/report.py afterwards. Of the folder of a site: what
left it, which of its files hold customers' data, and what a server can infer of what left."""


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        (config,) = parse(DESCRIPTION, argv, AuditConfig)
        audit(config)

    return run(work)


def audit(config: AuditConfig) -> None:
    from fedecider.audit.attacks import finished, outcome_table, write_outcome  # after the options: --help does without
    from fedecider.running.launch import start
    from fedecider.running.progress import console
    from fedecider.running.run_folder import SITE, check_output, read_run

    if SITE in (record := read_run(Path(config.run))):
        from fedecider.deployment.left import inferred_in_words, site_in_words

        print("\n".join(site_in_words(Path(config.run))), flush=True)
        with start(int(record["config"]["run"].get("num_threads", 0))) as launch:
            print("\n".join(inferred_in_words(config, launch)))
        return
    folder, result = finished(Path(config.run))
    check_output(folder.root)  # before hours of work
    attack = track_of_config(result.settings).part("audit")
    with start(int(result.settings["run"].get("num_threads", 0))) as launch:
        outcome = attack(config, launch)
    write_outcome(folder, outcome)
    console.print(outcome_table(outcome))
    print(f"written: {folder.audit}")
