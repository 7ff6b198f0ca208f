"""Scripts by which shells complete a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
_kd_export() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words=
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    COMPREPLY=()
    if [[ $COMP_CWORD == 1 ]]; then
        words='{commands}'
    elif [[ $word != -* ]]; then
        return
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _kd_export kd-export
"""
_ZSH = """\
#compdef kd-export
autoload -U +X bashcompinit && bashcompinit
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command, as far as a shell completes it.

    Attributes:
        help: What it does.
        options: Its options, such as ``--json``.
    """

    help: str
    options: Sequence[str]


def script(shell: str, commands: Mapping[str, Command]) -> str:
    """Write the script of a shell: it completes commands, options and names of files."""
    if shell == "fish":
        return _fish(commands)
    cases = "\n".join(
        f"        {name}) words='{' '.join(command.options)}' ;;"
        for name, command in commands.items()
    )
    found = _BASH.format(cases=cases, commands=" ".join(commands))
    return _ZSH + found if shell == "zsh" else found


def _fish(commands: Mapping[str, Command]) -> str:
    lines = []
    for name, command in commands.items():
        about = command.help.replace("'", "\\'")
        lines.append(f"complete -c kd-export -n __fish_use_subcommand -f -a {name} -d '{about}'")
        seen = f"complete -c kd-export -n '__fish_seen_subcommand_from {name}'"
        for option in command.options:
            dashes, word = ("-l", option[2:]) if option.startswith("--") else ("-s", option[1:])
            lines.append(f"{seen} {dashes} {word}")
    return "\n".join([*lines, ""])
