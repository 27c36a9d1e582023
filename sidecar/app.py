"""The command line of the sidecar.

Every command imports what it needs when it runs: `status` answers at once, and a broken optional dependency of one
command does not take the others with it. Whatever is the user's to correct is one line on stderr and exit code 1;
a command line that cannot be read is exit code 2.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.settings import SettingsError, settings_of
from sidecar.config import SidecarConfig, load_config, state_dir

USAGE_ERROR = 2
FAILED = 1
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except BrokenPipeError:
        # Whoever read the output has seen enough, as `| head` does; Python must not try to flush the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except SettingsError as error:
        _say_last(error)
        return USAGE_ERROR
    except ValueError as error:
        _say_last(error)
        return FAILED
    except KeyboardInterrupt:
        return 130


def _say_last(error: ValueError) -> None:
    from sidecar.log import say_last  # noqa: PLC0415 - see the module docstring

    say_last(f"dflash-sidecar: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dflash-sidecar", description="Receives a trainer's telemetry and turns it into Prometheus and W&B."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, help_text in (
        ("run", _run, "run in the foreground"),
        ("start", _start, "run in the background, unless one runs already; returns when it answers"),
    ):
        sub = _with_settings(commands.add_parser, name, help_text)
        sub.set_defaults(command=command)
        if command is _run:
            sub.add_argument(
                "--log", type=Path, metavar="FILE", help="write to a file, kept below 10 MiB, not to stderr"
            )
    stop = commands.add_parser("stop", help="stop the sidecar of a state directory")
    stop.set_defaults(command=_stop)
    status = commands.add_parser("status", help="what is alive, what is lost, what is live")
    status.add_argument("--json", action="store_true", help="for scripts")
    status.set_defaults(command=_status)
    push = commands.add_parser("push", help="upload the rows that wait in the spool, and return when W&B has them")
    push.set_defaults(command=_push)
    keys = commands.add_parser("keys", help="make the keys for trainers on other machines")
    keys.add_argument("directory", type=Path, metavar="DIR")
    keys.set_defaults(command=_keys)
    for name, is_wanted, help_text in (
        ("install", True, "make this environment the system's sidecar, under systemd"),
        ("uninstall", False, "remove the service; what it recorded stays"),
    ):
        sub = commands.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
        sub.add_argument("--dry-run", action="store_true", help="say what would be done")
        sub.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="root directory of an image [/]")
        sub.set_defaults(command=_service, is_wanted=is_wanted)
    _add_places(stop)
    _add_places(status)
    _add_places(push, listens=False)
    _add_commands_about_definitions(commands)
    return parser


def _add_commands_about_definitions(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    check = commands.add_parser("check", help="check a file of metric definitions")
    check.add_argument("file", type=Path, metavar="FILE")
    check.add_argument("--json", action="store_true", help="for editors")
    check.set_defaults(command=_check)
    apply = commands.add_parser("apply", help="check a file of metric definitions, show what it changes, make it live")
    what = apply.add_mutually_exclusive_group(required=True)
    what.add_argument("file", type=Path, nargs="?", metavar="FILE")
    what.add_argument("--rollback", action="store_true", help="go back to the file before; a second time: forth again")
    apply.add_argument("--dry-run", action="store_true", help="stop before anything is replaced")
    apply.set_defaults(command=_apply)
    backfill = commands.add_parser("backfill", help="compute definitions over the retained past")
    backfill.add_argument("metrics", nargs="*", metavar="METRIC", help="names of definitions; all when none is given")
    backfill.add_argument("--since", metavar="WHEN", help="90m, 7d, or 2026-01-31T12:00; default: all that is retained")
    backfill.add_argument("--openmetrics", type=Path, metavar="FILE", help="write a file for promtool, not to W&B")
    backfill.set_defaults(command=_backfill)
    rules = commands.add_parser("rules", help="write definitions as a recording-rule file for Prometheus")
    rules.add_argument("metrics", nargs="*", metavar="METRIC", help="names of definitions; all when none is given")
    rules.add_argument("--interval", type=float, default=15.0, metavar="SECONDS", help="between evaluations [15]")
    rules.set_defaults(command=_rules)
    dashboard = commands.add_parser("dashboard", help="write definitions as a dashboard for Grafana")
    names_help = "names of definitions; all that are not shipped when none is given"
    dashboard.add_argument("metrics", nargs="*", metavar="METRIC", help=names_help)
    dashboard.set_defaults(command=_dashboard)
    _add_definitions(dashboard)
    for sub in (backfill, rules):
        sub.add_argument("--label", action="append", default=[], metavar="NAME=VALUE", help="put on every series")
        _add_definitions(sub)
    for sub in (check, apply, backfill, rules, dashboard):
        _add_places(sub, listens=sub not in {check, dashboard})


def _with_settings(add: Callable[..., argparse.ArgumentParser], name: str, help_text: str) -> argparse.ArgumentParser:
    sub = add(
        name,
        help=help_text,
        description=help_text[0].upper() + help_text[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="settings, for --set, --config and DFLASH_ variables (DFLASH_WANDB_MODE=off):\n" + _settings_table(),
    )
    _add_places(sub)
    _add_definitions(sub)
    return sub


def _add_definitions(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--definitions", metavar="FILE", help="metric definitions; default STATE_DIR/metrics.toml, else those shipped"
    )


def _add_places(sub: argparse.ArgumentParser, *, listens: bool = True) -> None:
    sub.add_argument("--state-dir", metavar="DIR", help="directory of journal, spool and log")
    if listens:
        sub.add_argument("--listen", metavar="HOST:PORT", help="address of /metrics and the API")
    sub.add_argument("--config", metavar="FILE", help="TOML file with settings")
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one setting; repeatable")


def _settings_table() -> str:
    lines = []
    for setting in settings_of(SidecarConfig):
        default = f" [{setting.default}]" if setting.default != "" else ""
        lines.append(f"  {setting.key:24} {setting.description}{default}")
    return "\n".join(lines)


def _config(arguments: argparse.Namespace) -> SidecarConfig:
    given = {
        "state_dir": arguments.state_dir,
        "listen": getattr(arguments, "listen", None),
        "definitions": getattr(arguments, "definitions", None),
    }
    flags = {key: value for key, value in given.items() if value is not None}
    return load_config(flags, arguments.set, arguments.config, os.environ)


def _run(arguments: argparse.Namespace) -> int:
    from sidecar.commands import run  # noqa: PLC0415 - see the module docstring

    config = _config(arguments)
    return run(config, state_dir(config, os.environ), arguments.log)


def _start(arguments: argparse.Namespace) -> int:
    from sidecar.background import start  # noqa: PLC0415 - see the module docstring

    config = _config(arguments)
    print(start(config, state_dir(config, os.environ), _again(arguments)))
    return 0


def _again(arguments: argparse.Namespace) -> list[str]:
    """The options of this command line, for the process in the background."""
    pairs = [("--state-dir", arguments.state_dir), ("--listen", arguments.listen), ("--config", arguments.config)]
    pairs += [("--definitions", arguments.definitions), *(("--set", assignment) for assignment in arguments.set)]
    return [text for flag, value in pairs if value is not None for text in (flag, value)]


def _stop(arguments: argparse.Namespace) -> int:
    from sidecar.background import stop  # noqa: PLC0415 - see the module docstring

    config = _config(arguments)
    print(stop(config, state_dir(config, os.environ)))
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from sidecar.background import fetch_status  # noqa: PLC0415 - see the module docstring
    from sidecar.status import table  # noqa: PLC0415 - see the module docstring

    config = _config(arguments)
    text, document = fetch_status(config, state_dir(config, os.environ))
    print(text.rstrip() if arguments.json else table(document))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from sidecar.commands import check  # noqa: PLC0415 - see the module docstring
    from sidecar.definition_report import good_line, report  # noqa: PLC0415 - see the module docstring
    from sidecar.definition_source import DefinitionsError  # noqa: PLC0415 - see the module docstring

    config = _config(arguments)
    try:
        accepted = check(arguments.file, state_dir(config, os.environ))
    except DefinitionsError as error:
        print(report(arguments.file, error), file=sys.stdout) if arguments.json else print(error, file=sys.stderr)
        return FAILED
    print(report(arguments.file, accepted) if arguments.json else good_line(accepted))
    return 0


def _apply(arguments: argparse.Namespace) -> int:
    from sidecar.apply import apply  # noqa: PLC0415 - see the module docstring
    from sidecar.definition_source import DefinitionsError  # noqa: PLC0415 - see the module docstring

    config = _config(arguments)
    try:
        apply(config, state_dir(config, os.environ), arguments.file, print, only_try=arguments.dry_run)
    except DefinitionsError as error:
        print(f"{error}\nnothing was replaced", file=sys.stderr)
        return FAILED
    return 0


def _backfill(arguments: argparse.Namespace) -> int:
    from sidecar.commands import backfill, export_past  # noqa: PLC0415 - see the module docstring

    config = _config(arguments)
    path = state_dir(config, os.environ)
    if (file := arguments.openmetrics) is None:
        print(backfill(config, path, arguments.metrics, arguments.since, lambda line: print(line, file=sys.stderr)))
    else:
        print("\n".join(export_past(config, path, arguments.metrics, arguments.since, arguments.label, file)))
    return 0


def _rules(arguments: argparse.Namespace) -> int:
    from sidecar.commands import rules  # noqa: PLC0415 - see the module docstring

    config = _config(arguments)
    path = state_dir(config, os.environ)
    print(rules(config, path, arguments.metrics, arguments.label, arguments.interval), end="")
    return 0


def _dashboard(arguments: argparse.Namespace) -> int:
    from sidecar.commands import dashboard  # noqa: PLC0415 - see the module docstring

    config = _config(arguments)
    print(dashboard(config, state_dir(config, os.environ), arguments.metrics), end="")
    return 0


def _keys(arguments: argparse.Namespace) -> int:
    from shared.curve import make_keys  # noqa: PLC0415 - see the module docstring

    trainer, sidecar = make_keys(arguments.directory)
    print(f"made {trainer} and {sidecar}; each holds a secret: copy them only over ssh or the like")
    print(f"trainers: --set telemetry.endpoint=tcp://HOST:PORT --set telemetry.keys={trainer}")
    print(f"sidecar:  --set 'remote.endpoints=[\"tcp://HOST:PORT\"]' --set remote.keys={sidecar}")
    return 0


def _service(arguments: argparse.Namespace) -> int:
    from sidecar.service import Target, install, uninstall  # noqa: PLC0415 - see the module docstring

    target = Target(root=arguments.root.resolve(), only_say=arguments.dry_run, say=print)
    (install if arguments.is_wanted else uninstall)(target)
    return 0


def _push(arguments: argparse.Namespace) -> int:
    from sidecar.commands import push  # noqa: PLC0415 - see the module docstring

    config = _config(arguments)
    return push(config, state_dir(config, os.environ))
