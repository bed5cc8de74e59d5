"""The list of commands in ``kvcached --help``, by what people want to do, a line for each."""

from __future__ import annotations

from typing import Final

import click

#: Headings in order; under each its commands, with what fits a line of 80 columns.
SECTIONS: Final = {
    "Set up": {
        "demo": "Kill an engine and reuse its cached blocks.",
        "init": "Write a configuration and a systemd unit.",
        "check-config": "Check a configuration against this machine.",
        "capacity": "Print how many blocks and tokens a configuration holds.",
        "doctor": "Check an engine's environment and its arguments.",
    },
    "Run": {
        "serve": "Run the daemon until SIGTERM or SIGINT.",
        "supervise": "Run `serve`, restart it after a crash, keep its memory.",
    },
    "Look": {
        "health": "Send a real request through every worker.",
        "describe": "Print replicas, layouts, limits, versions.",
        "stats": "Print counters and gauges.",
        "tree": "Show the index: runs of blocks and their copies.",
        "inspect": "Show where one block is, and which requests hold it.",
        "explain": "Say why a prompt missed.",
        "check": "Run the invariant checker on the live daemon.",
        "version": "Print the version.",
    },
    "Operate": {
        "pin": "Keep the cached blocks of a prompt for a time.",
        "unpin": "End a pin.",
        "clear": "Forget all cached blocks of a replica or namespace.",
        "set-weights": "Set the version of the weights, and clear.",
        "set-policy": "Change when blocks are copied to host memory.",
        "storage": "Show, attach, detach or clear storage.",
        "pause": "Stop starting copies between device and host memory.",
        "drain": "Stop admitting sessions and leases.",
        "resume": "End a pause or a drain.",
    },
}


class GroupedCommands(click.Group):
    """A group whose help lists its commands under `SECTIONS`."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        """Write the sections."""
        for heading, commands in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl(list(commands.items()))
