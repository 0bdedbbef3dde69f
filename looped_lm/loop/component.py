"""What a checkpoint and a run record need to know of a component: its class and how it was built.

Every seam's base class derives from `Component`, which remembers the arguments of its constructor. `component_spec`
turns a component back into `{"class_path": ..., "init_args": ...}` (plain JSON types), and `instantiate` accepts either
that form or a callable, so that a checkpoint alone rebuilds the model it holds, also one built in Python.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from looped_lm.common.errors import UserError

Spec = dict[str, Any]


class Component:
    """Base of everything that can be named by class path; records the arguments of its constructor."""

    _arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Component:
        self = super().__new__(cls)
        # bind_partial: unpickling and deepcopy call __new__ without arguments and restore __dict__ afterwards.
        bound = inspect.signature(cls).bind_partial(*args, **kwargs)
        # With defaults: a default that changes later must not rebuild another component from an old checkpoint.
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        for name, parameter in inspect.signature(cls).parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(name))
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and arguments.pop(name):
                raise UserError(
                    f"{cls.__qualname__} takes *{name}, which no configuration or checkpoint can name."
                )
        self.__dict__["_arguments"] = arguments
        return self


class PerRecurrence:
    """Mixed into what runs inside the loop: what it does where evaluation runs more recurrences than training did.

    Parameters that all recurrences share allow any count. Those of single recurrences end with the trained count, and
    what comes after needs a rule, which only their author can give.
    """

    #: Whether parameters belong to one recurrence each; such parameters get no gradient where recurrences are left out.
    step_specific: bool = False

    def beyond_trained(self, i: int, trained: int) -> int:
        """Which trained recurrence (0..trained-1) lends its parameters to recurrence `i` >= `trained`.

        Asked of step-specific components only. A subclass that has a rule overrides this and uses it in the loop.

        Raises:
            UserError: there is no rule.
        """
        raise UserError(
            f"{type(self).__name__} has parameters of its own for each of {trained} recurrences and no rule for "
            f"recurrence {i + 1}: evaluate at most {trained}, or give the class a method `beyond_trained`."
        )


def class_path(obj: type | Callable[..., Any]) -> str:
    """Import path of a class or function, short where the package re-exports it.

    Raises:
        UserError: it is defined inside a function and has no import path.
    """
    module, name = obj.__module__, obj.__qualname__
    if "<" in name:
        raise UserError(
            f"{name} is defined inside a function, so no checkpoint or record could name it: define it at the top "
            "level of a module."
        )
    package = module.split(".")[0]
    if package != module and getattr(importlib.import_module(package), name, None) is obj:
        return f"{package}.{name}"
    return f"{module}.{name}"


def component_spec(component: Component, sizes: int = 0) -> Spec:
    """`{"class_path", "init_args"}` of a component.

    Args:
        component: the component.
        sizes: how many leading constructor arguments the model supplies itself; they are left out of `init_args`.

    Raises:
        UserError: an argument is not plain data, so no checkpoint could restore it.
    """
    supplied = list(inspect.signature(type(component)).parameters)[:sizes]
    arguments = {k: v for k, v in component._arguments.items() if k not in supplied}
    owner = type(component).__qualname__
    return {
        "class_path": class_path(type(component)),
        "init_args": {name: _plain(value, f"{owner}({name}=...)") for name, value in arguments.items()},
    }


def callable_spec(factory: Callable[..., Any], owner: str) -> Spec:
    """`{"class_path", "init_args"}` of a class or a `functools.partial` of one (an optimizer factory, for example).

    `init_args` holds every argument that has a value, defaults included.

    Raises:
        UserError: the callable is neither, so no checkpoint could restore it.
    """
    if isinstance(factory, functools.partial):
        # A parser's partial calls the class through functions of its own and passes it as the last argument.
        *_, target = (factory.func, *factory.args)
        given = factory.keywords
    else:
        target, given = factory, {}
    if inspect.isclass(target):
        parameters = inspect.signature(target).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        keywords = {name: _plain(value, f"{owner}.{name}") for name, value in {**defaults, **given}.items()}
        return {"class_path": class_path(target), "init_args": keywords}
    raise UserError(
        f"{owner} is {factory!r}, which a checkpoint cannot restore: give a class, a functools.partial of a class "
        "with keyword arguments only, or {'class_path': ..., 'init_args': ...}."
    )


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Component):
        return component_spec(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v, where) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, where) for v in value]
    raise UserError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot store as plain data: component arguments "
        "must be numbers, strings, booleans, None, lists, dicts or other components."
    )


def import_class(path: str) -> Any:
    """The object that a class path names.

    Raises:
        UserError: no such module or attribute; the message lists the attributes there are.
    """
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"Class path {path!r}: cannot import module {module_name!r} ({error}).") from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = ", ".join(n for n in sorted(dir(module)) if not n.startswith("_"))
        raise UserError(
            f"Class path {path!r}: module {module_name!r} has no {name!r}; it has: {public}."
        ) from None


def as_factory(factory: Callable[..., Any] | Mapping[str, Any]) -> Callable[..., Any]:
    """A callable from a callable or from `{"class_path", "init_args"}` as stored in checkpoints."""
    if not isinstance(factory, Mapping):
        return factory
    unknown = set(factory) - {"class_path", "init_args"}
    if unknown or "class_path" not in factory:
        raise UserError(f"A component is given as class_path and init_args; got the keys {sorted(factory)}.")
    init_args = {k: _revive(v) for k, v in (factory.get("init_args") or {}).items()}
    return functools.partial(import_class(factory["class_path"]), **init_args)


def build(factory: Callable[..., Any] | Mapping[str, Any], seam: str, *sizes: int) -> Any:
    """The component of a seam from its factory, called with the sizes that the model supplies.

    Raises:
        UserError: the factory does not take these sizes.
    """
    factory = as_factory(factory)
    try:
        return factory(*sizes)
    except TypeError as error:
        raise UserError(
            f"The {seam} {factory!r} cannot be built from the model's {len(sizes)} size(s) {sizes}: {error}. Its "
            "constructor takes them first, as its base class does."
        ) from error


def _revive(value: Any) -> Any:
    if isinstance(value, Mapping) and "class_path" in value:
        return as_factory(value)()
    return value


def as_instance(component: Any) -> Any:
    """The component itself, built first if given as `{"class_path", "init_args"}`."""
    return as_factory(component)() if isinstance(component, Mapping) else component
