"""`TorchPolicy`: run a torch module on the workers' CPUs, in eval mode; the head's module stays untouched.

Its forward pass is exported, so that workers need no torch; what cannot be exported runs as a copy of the module. The
structure is sent once, the acting weights with each version. This file is imported only when a torch module is
attached.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import Space

from clusterenv.arguments import expect, shown
from clusterenv.errors import PolicyError
from clusterenv.policy.acting.base import PAD, Actor, Prepared, Recipe
from clusterenv.policy.acting.distributions import Family, family_for
from clusterenv.policy.acting.named import Named, class_at
from clusterenv.policy.acting.shapes import LOOKED_FOR, call_module, candidates, example_for, from_distribution, pack
from clusterenv.policy.acting.torch_actor import Forward, FromDist, TorchRecipe, hollow, to_tensor
from clusterenv.policy.acting.torch_changes import Changes
from clusterenv.policy.acting.torch_head import TorchHeadActor, device_of
from clusterenv.policy.onnx.errors import NotExportable
from clusterenv.policy.weights.encoding import Weights
from clusterenv.rollout import map_arrays

__all__ = ["TorchPolicy"]

_TOLERANCE = 1e-4

Runtime = Literal["auto", "onnx", "torch"]


class TorchPolicy:
    """A torch module as a policy.

    Args:
        module: any `nn.Module`, on any device.
        dist: how to get a distribution from it. A function `dist(module, obs)` that returns one of
            `torch.distributions` (recurrent: `dist(module, obs, state, episode_start) -> (distribution, state)`),
            or the name of one whose parameters are `module(obs)`: "categorical" and "bernoulli" (logits), "normal"
            and "tanh-normal" (mean, log_std), "deterministic" (the action), "epsilon-greedy" (Q-values).
            None: the shapes of CleanRL's and Stable-Baselines3's agents are recognised, and checked against the
            module's own log-probability.
        acting: prefixes of the `state_dict` that acting needs; the rest is never sent. None: all of it, or the
            prefixes that a recognised shape is known to need.
        initial_state: recurrent policies: `initial_state(rows)` returns the state before the first observation, a
            (nested tuple of) tensor [rows, ...]. `dist` must reset the state itself where `episode_start` is 1.
        action_mask: key of the observation, or of the infos, that holds the allowed actions.
        made_by: for nodes that accept no pickled code (`allow_pickle=False`), if the policy runs in torch: how they
            construct the module themselves, as `("package.module:Class", {arguments})`. `dist` must then be None or a
            name.
        runtime: "onnx" exports the forward pass, which workers then run with ONNX Runtime instead of torch; "torch"
            runs copies of the module; "auto" exports if `onnxruntime` is installed and the exported policy agrees with
            torch. `collector.stats()["policy"]` tells which of them runs, and why.
        epsilon, noise: for "epsilon-greedy" and "deterministic"; a number, or one per slot. May change at any time.

    Observations arrive as tensors [B, ...]: floats and 8-bit images as float32, other integers as they are.

    Example:
        >>> import torch, clusterenv as ce
        >>> q_net = torch.nn.Linear(4, 2)
        >>> policy = ce.TorchPolicy(q_net, dist="epsilon-greedy", epsilon=0.1)
        >>> with ce.ClusterEnv("CartPole-v1", num_envs=4) as envs:
        ...     batch = envs.collector(policy, seed=1).rollout(8)
        >>> batch.transitions().actions.shape
        (32,)
    """

    packages: tuple[str, ...] = ("torch",)
    """What workers need to run this policy; known once it is prepared."""

    def __init__(
        self,
        module: Any,
        dist: Forward | str | None = None,
        *,
        acting: Sequence[str] | None = None,
        initial_state: Callable[[int], Any] | None = None,
        action_mask: str | None = None,
        made_by: tuple[str, dict[str, Any]] | None = None,
        runtime: Runtime = "auto",
        epsilon: Any = 0.0,
        noise: Any = 0.0,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            hint = f"; this is the class, write {module.__name__}(...)" if isinstance(module, type) else ""
            raise PolicyError(f"TorchPolicy(module={shown(module)}): expected a torch.nn.Module{hint}")
        expect("TorchPolicy", "dist", dist, Callable[..., Any] | str | None)
        expect("TorchPolicy", "acting", acting, Sequence[str] | None)
        expect("TorchPolicy", "initial_state", initial_state, Callable[..., Any] | None)
        expect("TorchPolicy", "action_mask", action_mask, str | None)
        expect("TorchPolicy", "runtime", runtime, Runtime)
        self.module = module
        self.epsilon = epsilon
        self.noise = noise
        self._dist = dist
        self._acting = None if acting is None else tuple(acting)
        self._initial_state = initial_state
        self._mask = action_mask
        self._made_by = made_by
        self._runtime: Runtime = runtime
        self._refused = ""  # why an exported policy cannot be used here
        self._changes = Changes()

    # -- called by the collector ------------------------------------------------------------------------------

    def prepare(self, observation_space: Space[Any], action_space: Space[Any]) -> Prepared:
        clone = _snapshot(self.module)
        obs = map_arrays(to_tensor, _sample(observation_space))
        if self._dist is None:
            forward, family, acting, description = _recognise(clone, obs, action_space)
        elif isinstance(self._dist, str):
            family = family_for(self._dist, action_space)
            forward, acting, description = call_module, None, f"module(obs) as {family.name}"
            _check_params(_run(forward, clone, obs), family, description)
        else:
            forward, family, description = self._try_dist(clone, obs, action_space)
            acting = None
        self._forward = forward
        self._travels = self._names(clone, self._acting or acting)
        self._verify_acting(clone, forward, obs)
        recipe, runtime, self._reason = self._recipe(clone, forward, family, observation_space)
        self.packages = ("onnxruntime",) if runtime == "onnx" else ("torch",)
        is_recurrent = self._initial_state is not None
        return Prepared(recipe, family, self._mask, description, is_recurrent, runtime, self._reason)

    def stay_in_torch(self, reason: str) -> bool:
        """Return whether the policy can run in torch instead, after it is prepared again."""
        self._refused = reason
        return self._runtime == "auto" and "onnxruntime" in self.packages

    def head_actor(self) -> Actor | None:
        """Return what acts in this process, once the policy is prepared; None: the recipe's actor, on the CPU."""
        if device_of(self.module).type == "cpu":
            return None
        return TorchHeadActor(self.module, self._forward, self._initial_state, self._travels)

    def weights(self) -> Weights:
        state = self.module.state_dict(keep_vars=True)
        missing = [name for name in self._travels if name not in state]
        if missing:
            raise PolicyError(f"the module no longer has {missing}: its architecture changed; make a new collector")
        try:
            return {name: state[name].detach().cpu().numpy() for name in self._travels}
        except TypeError as error:  # bfloat16, sparse, quantised
            raise PolicyError(
                f"a parameter of the module cannot become a numpy array, so it cannot travel: {error}"
            ) from error

    def token(self) -> Any:
        state = self.module.state_dict(keep_vars=True)
        return self._changes.count([state[name] for name in self._travels if name in state])

    def knobs(self) -> dict[str, Any]:
        return {"epsilon": _plain(self.epsilon), "noise": _plain(self.noise)}

    def describe(self) -> Named:
        if self._made_by is None:
            raise PolicyError(
                f"allow_pickle=False: the policy runs in torch ({self._reason}). Say how nodes can make this module "
                'themselves, TorchPolicy(module, made_by=("package.module:Class", {...}))'
            )
        if callable(self._dist) or self._initial_state is not None:
            raise PolicyError("allow_pickle=False: dist has to be None or a name, and the policy not recurrent")
        path, kwargs = self._made_by
        if class_at(path) is not type(self.module):
            raise PolicyError(f"made_by={path!r} is not the class of the module, {type(self.module).__qualname__}")
        acting = None if self._acting is None else list(self._acting)
        options = {"dist": self._dist, "acting": acting, "action_mask": self._mask, "runtime": "torch"}
        return Named(path, dict(kwargs), options)

    # -- inside -----------------------------------------------------------------------------------------------

    def _recipe(self, clone: Any, forward: Forward, family: Family, space: Space[Any]) -> tuple[Recipe, str, str]:
        """Return the recipe, what runs it, and why."""
        try:
            if self._runtime == "torch" or self._refused:
                raise NotExportable(self._refused or 'runtime="torch"')
            if importlib.util.find_spec("onnxruntime") is None:
                raise NotExportable("onnxruntime is not installed: pip install clusterenv[onnx]")
            from clusterenv.policy.onnx.export import SAMPLES, export

            samples = _sample(space, SAMPLES)
            recipe = export(copy.deepcopy(clone), forward, samples, self._initial_state, self._travels, family.name)
            return recipe, "onnx", "exported; its output equals torch's"
        except NotExportable as error:
            if self._runtime == "onnx":
                raise PolicyError(f'runtime="onnx": the policy cannot be exported: {error}') from error
            return TorchRecipe(hollow(clone), forward, self._initial_state), "torch", str(error)

    def _try_dist(self, clone: Any, obs: Any, action_space: Space[Any]) -> tuple[Forward, Family, str]:
        assert callable(self._dist)
        recurrent = self._initial_state is not None
        if recurrent != (len(inspect.signature(self._dist).parameters) >= 4):
            raise PolicyError(
                "a recurrent policy needs both initial_state=... and dist(module, obs, state, episode_start); "
                "other policies need dist(module, obs)"
            )
        forward = FromDist(self._dist)
        try:
            with torch.inference_mode():
                if self._initial_state is not None:
                    state = self._initial_state(PAD)
                    map_arrays(_check_state, state)
                    given, _ = self._dist(clone, obs, state, torch.ones(PAD))
                else:
                    given = self._dist(clone, obs)
                name, params = from_distribution(given)
        except PolicyError:
            raise
        except Exception as error:  # the user's own code
            raise PolicyError(f"dist failed on a batch of {PAD} observations: {error!r}") from error
        family = family_for(name, action_space)
        _check_params(params, family, "dist")
        return forward, family, f"dist function, {family.name}"

    def _names(self, clone: Any, acting: tuple[str, ...] | None) -> tuple[str, ...]:
        names = tuple(clone.state_dict())
        if acting is None:
            return names
        chosen = tuple(n for n in names if any(n == p or n.startswith(p + ".") for p in acting))
        for prefix in acting:
            if not any(n == prefix or n.startswith(prefix + ".") for n in chosen):
                raise PolicyError(f"acting={prefix!r} names nothing in the module's state_dict: {sorted(names)}")
        return chosen

    def _verify_acting(self, clone: Any, forward: Forward, obs: Any) -> None:
        """Raise if acting depends on weights that are not sent: NaN in them must not change the output."""
        left_out = [name for name in clone.state_dict() if name not in self._travels]
        if not left_out:
            return
        poisoned = copy.deepcopy(clone)
        with torch.no_grad():
            for name, tensor in poisoned.state_dict().items():
                if name in left_out and tensor.is_floating_point():
                    tensor.fill_(float("nan"))
        state = self._initial_state(PAD) if self._initial_state is not None else None
        params = _run(forward, poisoned, obs, state)
        if not torch.isfinite(params).all():
            raise PolicyError(f"acting={self._travels} leaves out weights that acting needs, among {left_out}")


def _recognise(clone: Any, obs: Any, action_space: Space[Any]) -> tuple[Forward, Family, tuple[str, ...] | None, str]:
    tried = []
    for shape in candidates(clone, action_space):
        try:
            family = family_for(shape.family, action_space)
            params = _run(shape.forward, clone, obs)
            _check_params(params, family, shape.name)
            difference = _difference(shape.own_logprob, clone, obs, family, params)
        except Exception as error:  # a shape that does not fit may fail anywhere in the module's code
            tried.append(f"{shape.name}: {type(error).__name__}: {error}")
            continue
        if difference <= _TOLERANCE:
            checked = "its log-probability agrees with the module's own" if shape.own_logprob else "not checked"
            return shape.forward, family, shape.acting, f"{shape.name}, {family.name}, fast path ({checked})"
        tried.append(f"{shape.name}: its log-probability differs from the module's own by {difference:.2g}")
    raise PolicyError(
        f"{type(clone).__name__} has none of the known shapes. Looked for: {LOOKED_FOR}. "
        + (f"Tried: {'; '.join(tried)}. " if tried else "")
        + f"Say how it acts: TorchPolicy(module, dist=lambda module, obs: {example_for(action_space)})"
    )


def _difference(own: Any, clone: Any, obs: Any, family: Family, params: Any) -> float:
    if own is None:
        return 0.0
    noise = np.random.default_rng(0).standard_normal((PAD, family.noise_size), dtype=np.float32)
    actions, _ = family.choose(params.numpy(), noise, {})
    with torch.no_grad():
        theirs = own(clone, obs, torch.from_numpy(np.ascontiguousarray(actions)))
    return float(np.abs(theirs.numpy().reshape(-1) - family.score(params.numpy(), noise, actions, {})).max())


def _run(forward: Forward, module: Any, obs: Any, state: Any = None) -> Any:
    try:
        with torch.inference_mode():
            if state is not None:
                return pack(forward(module, obs, state, torch.ones(PAD))[0])
            return pack(forward(module, obs))
    except Exception as error:  # the user's own code
        raise PolicyError(f"the module failed on a batch of {PAD} observations: {error!r}") from error


def _check_params(params: Any, family: Family, what: str) -> None:
    if tuple(params.shape) != (PAD, family.num_params):
        raise PolicyError(
            f"{what}: the policy gave {tuple(params.shape)} numbers for {PAD} observations; a {family.name} policy "
            f"over this action space needs {(PAD, family.num_params)}"
        )


def _check_state(leaf: Any) -> None:
    if leaf.shape[:1] != (PAD,):
        raise PolicyError(
            f"initial_state({PAD}) gave a tensor of shape {tuple(leaf.shape)}: its first axis must be the rows, "
            "[rows, ...]; transpose it inside dist if the module takes [layers, rows, ...]"
        )


def _snapshot(module: Any) -> Any:
    try:
        clone = copy.deepcopy(module).cpu().eval()
    except Exception as error:  # copying runs user code too
        raise PolicyError(f"the module cannot be copied, so it cannot travel: {error!r}") from error
    for parameter in clone.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    return clone


def _sample(space: Space[Any], rows: int = PAD) -> Any:
    """Return a batch of observations of the space, the same at every call."""
    own = copy.deepcopy(space)
    own.seed(0)
    return map_arrays(lambda *values: np.stack(values), *(own.sample() for _ in range(rows)))


def _plain(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
