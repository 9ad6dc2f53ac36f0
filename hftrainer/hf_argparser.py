"""`HfArgumentParser` builds dataclasses from the command line; it does not need transformers."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import enum
import json
import os
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Union

from hftrainer.arguments import old_names
from hftrainer.arguments.fields.argument import EARLIER_SUBJECT, LAST_SUBJECTS, arguments_of
from hftrainer.arguments.fields.old import OldArguments
from hftrainer.base.config_files import parse_bool, read_mapping
from hftrainer.base.tracebacks import HideEngineFrames
from hftrainer.errors import InvalidArgument, explain_choice, suggest


def string_to_bool(value: str | bool) -> bool:
    """Convert `true`, `yes`, `t`, `y`, `1` or their opposites, in any case, to a boolean."""
    if (flag := parse_bool(value)) is None:
        raise argparse.ArgumentTypeError(f"{value!r} is neither true nor false: write true or false")
    return flag


#: Number of lines from which an error does not print the usage.
_LONG_USAGE = 24


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows one spelling of each option, and appends long lists of choices to its help text."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        copied = copy.copy(action)
        names = [name for name in action.option_strings if "-" not in name[2:]]
        copied.option_strings = names or action.option_strings
        if self._is_long(action):
            copied.metavar = "NAME"
        return super()._format_action_invocation(copied)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        help = action.help or ""
        has_default = action.const is False or ("default '" in help and "' until v" not in help)
        text = action.help if has_default else super()._get_help_string(action)
        return f"{text} One of {', '.join(map(str, action.choices or ()))}." if self._is_long(action) else text

    @staticmethod
    def _is_long(action: argparse.Action) -> bool:
        return len(", ".join(map(str, action.choices or ()))) > 40


class HfArgumentParser(argparse.ArgumentParser):
    """A parser whose options are the fields of dataclasses.

    A field `a_name` becomes `--a_name` and `--a-name`. A boolean whose default is True also has `--no_a_name`. A list
    accepts several values. The choices of an enumeration or a literal are its values. The field's metadata may contain
    `help`, `aliases` and other arguments of `add_argument`.

    Args:
        dataclass_types: one or more dataclasses, in the order of the results, or None.
        kwargs: arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, dataclass_types: Any = (), **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Help)
        super().__init__(**kwargs)
        self.dataclass_types = [dataclass_types] if isinstance(dataclass_types, type) else list(dataclass_types or ())
        for dataclass_type in self.dataclass_types:
            self._add_dataclass(dataclass_type)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2. A long usage is not printed, since it would hide the message."""
        message = explain_choice(message)
        if self.format_usage().count("\n") < _LONG_USAGE:
            super().error(message)
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def parse_args_into_dataclasses(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """Parse the command line into an instance of each dataclass.

        Args:
            args: the command-line arguments; default `sys.argv[1:]`.
            return_remaining_strings: whether to return unrecognized arguments too. Otherwise they are an error:
                ValueError if `args` are given, else the script exits with status 2, as for an invalid value.
            look_for_args_file: whether to first read a file with the script's name and the suffix `.args`.
            args_filename: a file of arguments that is read first.
            args_file_flag: an option whose value is such a file.
        """
        words = list(sys.argv[1:] if args is None else args)
        files = [Path(args_filename)] if args_filename else []
        if not args_filename and look_for_args_file and sys.argv and sys.argv[0]:
            files = [Path(sys.argv[0]).with_suffix(".args")]
        if args_file_flag:
            named_files, words = _split_off_files(args_file_flag, words)
            files += named_files
        file_words = [word for path in files if path.exists() for word in path.read_text().split()]
        namespace, remaining = self.parse_known_args(args=file_words + words)
        with HideEngineFrames():
            if remaining and not return_remaining_strings:
                hints = "".join(suggest(word, self._option_string_actions) for word in remaining if word[:1] == "-")
                message = f"Unrecognized command-line arguments: {remaining}{hints}"
                # As for an invalid value. Callers that pass words may catch the ValueError of transformers.
                if args is None:
                    self.error(message)
                raise InvalidArgument(message if hints else f"{message}; see {self.prog} --help")
            objects = [self._make_dataclass(dataclass_type, namespace) for dataclass_type in self.dataclass_types]
            if vars(namespace):
                objects.append(namespace)
            if return_remaining_strings:
                return (*objects, remaining)
            return (*objects,)

    def parse_dict(self, args: dict[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Parse a mapping into an instance of each dataclass.

        Raises:
            InvalidArgument: for keys that are not fields, unless `allow_extra_keys`.
        """
        extra_keys = set(args)
        objects = []
        with HideEngineFrames():
            for dataclass_type in self.dataclass_types:
                names = {field.name for field in dataclasses.fields(dataclass_type) if field.init}
                names |= _find_hidden_fields(dataclass_type).keys()
                extra_keys -= names
                objects.append(dataclass_type(**{name: value for name, value in args.items() if name in names}))
            if extra_keys and not allow_extra_keys:
                raise InvalidArgument(f"No dataclass has a field {', '.join(map(repr, sorted(extra_keys)))}.")
            return (*objects,)

    def parse_json_file(self, json_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Parse a JSON file into an instance of each dataclass.

        Raises:
            InvalidArgument: if the file is not a JSON object, or as for `parse_dict`.
        """
        with HideEngineFrames():
            return self.parse_dict(read_mapping(json_file, "JSON"), allow_extra_keys)

    def parse_yaml_file(self, yaml_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Parse a YAML file into an instance of each dataclass; raises as `parse_json_file` does."""
        with HideEngineFrames():
            return self.parse_dict(read_mapping(yaml_file, "YAML"), allow_extra_keys)

    @staticmethod
    def _make_dataclass(dataclass_type: Any, namespace: argparse.Namespace) -> Any:
        names = [field.name for field in dataclasses.fields(dataclass_type) if field.init]
        values = {name: getattr(namespace, name) for name in names}
        values |= {name: getattr(namespace, name) for name in _find_hidden_fields(dataclass_type) if name in namespace}
        for name in values:
            delattr(namespace, name)
        return dataclass_type(**values)

    def _add_dataclass(self, dataclass_type: Any) -> None:
        hints = typing.get_type_hints(dataclass_type)
        subjects = {name: argument.subject for name, argument in arguments_of(dataclass_type).items()}
        titles = [title for title in dict.fromkeys(subjects.values()) if title not in LAST_SUBJECTS]
        groups: dict[Any, Any] = {title: self.add_argument_group(title) for title in (*titles, *LAST_SUBJECTS)}
        own_title = getattr(dataclass_type, "_argument_group_name", None)
        groups[None] = self.add_argument_group(own_title) if own_title else self
        for field in dataclasses.fields(dataclass_type):
            if field.init:
                _add_field(groups[subjects.get(field.name)], field, hints[field.name])
        for name, field in _find_hidden_fields(dataclass_type).items():
            _add_field(groups[EARLIER_SUBJECT], field, hints[name], default=argparse.SUPPRESS)


def _split_off_files(flag: str, words: list[str]) -> tuple[list[Path], list[str]]:
    """The files that the option `flag` names, and the other words of a command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(flag, type=str, action="append")
    options, others = parser.parse_known_args(args=words)
    return [Path(name) for name in vars(options)[flag.lstrip("-").replace("-", "_")] or []], others


def _find_hidden_fields(dataclass_type: Any) -> dict[str, Any]:
    """Training arguments that `install()` accepts although the installed release lacks them."""
    hidden = old_names.HIDDEN_FIELDS if issubclass(dataclass_type, OldArguments) else {}
    return {name: field for name, field in hidden.items() if name not in dataclass_type.__dataclass_fields__}


def _add_field(group: Any, field: Any, hint: Any, **override: Any) -> None:
    options = [f"--{field.name}"] + ([f"--{field.name.replace('_', '-')}"] if "_" in field.name else [])
    settings = dict(field.metadata)
    aliases = settings.pop("aliases", [])
    aliases = [aliases] if isinstance(aliases, str) else aliases
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    value_type = _value_type(hint)
    flag_settings = dict(settings)
    if value_type is bool:
        settings.setdefault("type", string_to_bool)
        settings |= {"nargs": "?", "const": True}
        default = False if default is dataclasses.MISSING else default
    elif choices := _choices(value_type):
        choice_of_word = {str(choice): choice for choice in choices}
        settings |= {"choices": choices, "type": lambda word: choice_of_word.get(word, word)}
    elif _is_json(hint):
        settings["type"] = _parse_json_object
    elif typing.get_origin(value_type) is list or value_type is list:
        settings |= {"nargs": "+", "type": next(iter(typing.get_args(value_type)), str)}
        if settings["type"] is Any:
            settings["type"] = str
    else:
        settings["type"] = value_type if callable(value_type) and value_type is not Any else str
    settings |= {"required": True} if default is dataclasses.MISSING else {"default": default}
    settings |= override
    group.add_argument(*options, *aliases, **settings)
    if value_type is bool and default is True:
        flag_settings |= {"action": "store_false", "default": True, "dest": field.name, **override}
        flag_settings["help"] = f"The opposite of --{field.name}."
        group.add_argument(f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}", **flag_settings)


def _is_json(hint: Any) -> bool:
    """Whether a field accepts only a dict; if it also accepts text, the training arguments parse the text."""
    is_union = typing.get_origin(hint) is Union or isinstance(hint, types.UnionType)
    members = [member for member in (typing.get_args(hint) if is_union else [hint]) if member is not type(None)]
    return len(members) == 1 and dict in (members[0], typing.get_origin(members[0]))


def _parse_json_object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise argparse.ArgumentTypeError(f"""{text!r} is not a JSON object such as '{{"key": 1}}'""")
    return values


def _value_type(hint: Any) -> Any:
    """The type to which a command-line value is converted.

    For `X | str`, it is X. For a union with None, it is the second member, or the first if the second is None, as in
    transformers. JSON and values of any type remain strings.
    """
    if not (typing.get_origin(hint) is Union or isinstance(hint, types.UnionType)):
        return str if typing.get_origin(hint) is dict or hint in (dict, Any) else hint
    members = typing.get_args(hint)
    first, second = members[:2]
    if type(None) not in members:
        return _value_type(first if second is str else second)
    if bool in members and len(members) > 2:
        return str
    return _value_type(first if second is type(None) else second)


def _choices(value_type: Any) -> list[Any]:
    if typing.get_origin(value_type) is Literal:
        return list(typing.get_args(value_type))
    if isinstance(value_type, type) and issubclass(value_type, enum.Enum):
        return [member.value for member in value_type]
    return []
