"""What a checkpoint and a run record need to know about a component: its class and how it was built.

`component_spec` turns a component into `{"class_path": ..., "init_args": ...}` (plain JSON types) and `build` turns it
back, so that a checkpoint alone rebuilds its model.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from looped_lm.common.errors import UserError

if TYPE_CHECKING:
    from typing_extensions import Self

Spec = dict[str, Any]


class Component:
    """Base of everything that a class path can name; records the arguments of the constructor."""

    _arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        signature = inspect.signature(cls)
        try:
            # Unpickling and deepcopy call __new__ without arguments and restore __dict__ afterwards.
            bound = signature.bind_partial(*args, **kwargs)
        except TypeError:
            return self  # __init__ is about to refuse these arguments with its own error.
        # Recorded, since a default that changes later must not alter what an old checkpoint rebuilds.
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(name))
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and arguments.pop(name):
                raise UserError(
                    f"{cls.__qualname__} takes *{name}, which no configuration or checkpoint can name."
                )
        self.__dict__["_arguments"] = arguments
        return self


class ModelComponent(Component):
    """A component that is a module of the model; it says what it costs and how it trains."""

    def flops_per_token(self) -> float:
        """Forward FLOPs per token of one use: of one recurrence, or of one call within a layer."""
        return 0

    def parameter_roles(self) -> dict[str, str]:
        """Roles that do not follow from a parameter's shape, by the parameter's name within this module."""
        return {}


class PerRecurrence(ModelComponent):
    """A component that is told which recurrence it runs in, and may have parameters for each.

    Such parameters exist up to the trained count; recurrences beyond it need a rule from their author.
    """

    #: Whether each parameter belongs to one recurrence: a step that does not run it gives no gradient.
    step_specific: bool = False

    def beyond_trained(self, i: int, trained: int) -> int:
        """Which trained recurrence (0..trained-1) lends its parameters to recurrence `i` >= `trained`.

        A step-specific subclass with a rule overrides this and uses it in the loop; UserError if there is none.
        """
        raise UserError(
            f"{type(self).__name__} has separate parameters for each of {trained} recurrences and no rule for "
            f"recurrence {i + 1}: evaluate at most {trained}, or give the class a method `beyond_trained`."
        )


def class_path(obj: type | Callable[..., Any]) -> str:
    """Import path, short where the package re-exports the object; UserError if it has none."""
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
    """`{"class_path", "init_args"}` less the first `sizes` arguments; UserError if one is not plain data."""
    supplied = list(inspect.signature(type(component)).parameters)[:sizes]
    arguments = {k: v for k, v in component._arguments.items() if k not in supplied}
    owner = type(component).__qualname__
    return {
        "class_path": class_path(type(component)),
        "init_args": {name: _plain(value, f"{owner}({name}=...)") for name, value in arguments.items()},
    }


def callable_spec(factory: Callable[..., Any], owner: str) -> Spec:
    """The same for a class or a `functools.partial` of one, with all defaults; UserError for all else."""
    target, positional, given = _called(factory)
    if inspect.isclass(target) and not positional:
        parameters = inspect.signature(target).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        keywords = {name: _plain(value, f"{owner}.{name}") for name, value in {**defaults, **given}.items()}
        return {"class_path": class_path(target), "init_args": keywords}
    raise UserError(
        f"{owner} is {factory!r}, which a checkpoint cannot restore: give a class, a functools.partial of a class "
        "with keyword arguments only, or {'class_path': ..., 'init_args': ...}."
    )


def _called(factory: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What a factory calls in the end, and the arguments that it adds."""
    if not isinstance(factory, functools.partial):
        return factory, (), {}
    if factory.args and inspect.isclass(factory.args[-1]):
        # A parser's partial calls a function of the parser, with the class as the last argument.
        return factory.args[-1], (), factory.keywords
    return factory.func, factory.args, factory.keywords


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
        UserError: no such module or attribute. An import that fails inside the module keeps its own error.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or path.startswith("."):
        raise UserError(f"Class path {path!r} names no module: write it as module.Class.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UserError(f"Class path {path!r}: cannot import module {module_name!r} ({error}).") from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = ", ".join(n for n in sorted(dir(module)) if not n.startswith("_"))
        raise UserError(
            f"Class path {path!r}: module {module_name!r} has no {name!r}; it has: {public}."
        ) from None


def as_factory(factory: Callable[..., Any] | Mapping[str, Any]) -> Callable[..., Any]:
    """The callable, or one from `{"class_path", "init_args"}`; UserError for other keys or unknown paths."""
    if not isinstance(factory, Mapping):
        return factory
    unknown = set(factory) - {"class_path", "init_args"}
    if unknown or "class_path" not in factory:
        raise UserError(f"A component is given as class_path and init_args; got the keys {sorted(factory)}.")
    init_args = dict(factory.get("init_args") or {})
    for name, value in init_args.items():
        if isinstance(value, Mapping) and "class_path" in value:
            init_args[name] = as_instance(value)
    return functools.partial(import_class(factory["class_path"]), **init_args)


def as_instance(component: Any) -> Any:
    """The component itself, built if given as `{"class_path", "init_args"}`; raises what `build` raises."""
    return build(component, "component", {}) if isinstance(component, Mapping) else component


def build(factory: Callable[..., Any] | Mapping[str, Any], what: str, sizes: Mapping[str, Any]) -> Any:
    """Call a factory with the sizes that its owner supplies, by position and in this order.

    Raises:
        UserError: the constructor's signature does not accept these sizes, or there is nothing to call. What the
            constructor itself raises passes through: a fault in a component shows at its own line.
    """
    factory = as_factory(factory)
    target, positional, given = _called(factory)
    supplied = ", ".join(f"{name}={value!r}" for name, value in {**sizes, **given}.items())
    if isinstance(target, Component) or not callable(target):
        raise UserError(
            f"The {what} is {target!r}: give a class or a functools.partial of one, to be called with ({supplied})."
        )
    name = getattr(target, "__qualname__", repr(target))
    try:
        signature = inspect.signature(target)
    except ValueError:  # Some classes written in C have none.
        return factory(*sizes.values())
    try:
        signature.bind(*positional, *sizes.values(), **given)
    except TypeError as error:
        first = f"{' and '.join(sizes)} first, as its base class is, and " if sizes else ""
        raise UserError(
            f"The {what} {name}({', '.join(signature.parameters)}) cannot be built from ({supplied}): {error}. "
            f"Its constructor is given {first}its init_args by name."
        ) from None
    return factory(*sizes.values())
