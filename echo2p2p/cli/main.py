"""The command line: a table of commands, each loaded only when it runs, so that ``--help`` is instant."""

from __future__ import annotations

import importlib
import os
import sys

import rich_click as click

from echo2p2p._version import __version__
from echo2p2p.errors import Echo2p2pError

COMMANDS: dict[str, str] = {
    "doctor": "Can this machine take part? Checks what a run needs.",
    "bootstrap": "Run a bootstrap peer: the well-known door of a swarm.",
    "learner": "Train a policy with rollouts from the swarm.",
    "worker": "Roll out for a learner, for a price.",
    "inspect": "Look into a swarm: peers, workers, learners, manifests, records.",
    "simulate": "Play a swarm under virtual time: costs, waits and failures before anything is rented.",
    "plan": "Which workers keep a learner busy, and at what price?",
    "demo": "A whole swarm on this machine, trained until the reward has risen.",
    "report": "Draw a run: a PNG and a page.",
    "eval": "Mean reward of a policy on held-out prompts.",
    "export": "Write a published version as a Hugging Face folder.",
}
"""Every command with its help in one line; the module of the same name beside this one holds it."""

EXIT_CODES = """
Exit codes: 0 fine · 1 failure · 2 usage · 3 settings invalid · 4 cannot join the swarm · 5 verification failed ·
6 incompatible version · 7 out of disk or memory · 8 budget spent · 9 engine lost · 130 interrupted
"""


class LazyGroup(click.RichGroup):
    """Imports a command's module when the command runs, not when the group is listed."""

    def list_commands(self, _: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _: click.Context, cmd_name: str) -> click.Command | None:
        """What a listing needs: the name and one line of help."""
        return click.RichCommand(name=cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """What running or completing a command needs: the command itself."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            command = importlib.import_module(f"echo2p2p.cli.{name}").command
        return name, command, rest


@click.group(cls=LazyGroup, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="echo2p2p")
def cli() -> None:
    """Reinforcement learning of language models on a decentralised swarm.

    Start with `echo2p2p demo`, or with `bootstrap`, `learner` and `worker` on machines of your own.
    """


def main() -> None:
    """The console script: runs a command, and turns what it raises into one line and an exit code."""
    try:
        code = cli.main(standalone_mode=False, prog_name="echo2p2p")
    except click.Abort:
        code = 130
    except KeyboardInterrupt:
        code = 130
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except Echo2p2pError as error:
        click.echo(f"echo2p2p: {error}", err=True)
        code = error.exit_code
    except BrokenPipeError:
        # Whoever read our output has left; nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code if isinstance(code, int) else 0)
