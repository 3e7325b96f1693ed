"""What a policy accepts, how it prints, and which override wins."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time

import pytest
import torch
from torch import nn

from passes.contract.devices import DEVICES
from passes.contract.errors import PolicyError
from passes.contract.policy import Level, Override, Policy, Stack, check_used, module_override, op_override, type_names

STACK: Stack = [
    ("", ("models.Net", "torch.nn.Module")),
    ("blocks.0", type_names(nn.TransformerEncoderLayer)),
    ("blocks.0.norm1", type_names(nn.LayerNorm)),
]


class Norm(nn.LayerNorm):
    """A type of the user's own, derived from one of torch's."""


POLICIES = [
    Policy(),
    Policy("O0"),
    Policy("O3", dtype="fp16", device="cuda"),
    Policy("O2", output_dtype="low", cost="measured", unknown_ops="fp32", share_casts="never"),
    Policy(modules={"blocks.*.attn": "low", nn.LayerNorm: "fp32", Norm: "keep"}),
    Policy(ops={"softmax": "low", "my_lib::my_op": "fp32"}),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_policy_survives_its_string_form_copy_and_pickle(policy: Policy) -> None:
    assert Policy.parse(str(policy)) == copy.deepcopy(policy) == pickle.loads(pickle.dumps(policy)) == policy
    assert hash(Policy.parse(str(policy))) == hash(policy)
    assert copy.deepcopy(policy).level is pickle.loads(pickle.dumps(policy)).level is policy.level


def test_string_form_is_the_documented_one_without_settings_at_their_default() -> None:
    policy = Policy("O2", dtype="bf16", modules={"fc3": "fp32", nn.LayerNorm: "fp32"}, ops={"softmax": "low"})
    assert str(policy) == "O2,dtype=bf16,modules.fc3=fp32,modules.torch.nn.LayerNorm=fp32,ops.softmax=low"
    assert str(Policy("O1", output_dtype="original")) == "O1"


def test_replace_validates_again() -> None:
    assert dataclasses.replace(Policy("O2"), dtype=torch.bfloat16) == Policy("O2", dtype="bf16")
    with pytest.raises(PolicyError, match="device"):
        dataclasses.replace(Policy(), device="tpu")


def test_policy_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().level = Level.O2  # type: ignore[misc]


LAYER_NORM = Policy(modules={nn.LayerNorm: "fp32"})


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [
        (Policy.parse(" O2 , dtype = fp16 "), Policy("O2", dtype=torch.float16)),
        *((Policy(dtype=dtype), Policy(dtype=torch.float16)) for dtype in ("fp16", "float16", "half", "torch.float16")),
        *((Policy(device=device), Policy(device="cuda")) for device in ("cuda:1", torch.device("cuda", 0))),
        *((Policy(ops={"softmax": c}), Policy(ops=(("softmax", "fp32"),))) for c in ("float32", torch.float32)),
        (Policy(modules={"a": "low", "b": "fp32"}), Policy(modules=(("b", "fp32"), ("a", "low")))),
        (Policy(modules={"torch.nn.LayerNorm": "fp32"}), LAYER_NORM),
        (Policy(modules={"torch.nn.modules.normalization.LayerNorm": "fp32"}), LAYER_NORM),
    ],
)
def test_spellings_mean_the_same(spelled: Policy, meant: Policy) -> None:
    assert spelled == meant


def test_settings_are_kept_in_one_form() -> None:
    policy = Policy(modules={"fc3": "fp32"}, ops={"softmax": "float32"}, dtype="half", device="cuda:1")
    assert (policy.modules, policy.ops) == ((("fc3", "fp32"),), (("softmax", "fp32"),))
    assert (policy.dtype, policy.device) == (torch.float16, "cuda")


def test_of_takes_nothing_a_string_or_a_policy() -> None:
    policy = Policy("O2", dtype="fp16")
    assert Policy.of(None) == Policy("O1")
    assert Policy.of("O2,dtype=fp16") == policy
    assert Policy.of(policy) is policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("O4", "unknown level 'O4'; legal: O0, O1, O2, O3$"),
        ("o2", "unknown level 'o2'; legal: O0, O1, O2, O3"),
        ("02,dtype=bf16", "unknown level '02'; .*; '02' begins with the digit 0, and a level with the letter O: 'O2'$"),
        ("04", "unknown level '04'; legal: O0, O1, O2, O3$"),
        ("O1 dtype=bf16", "settings are separated by commas: 'O1,dtype=bf16'$"),
        ("O2 dtype=bf16 cost=bytes,device=cpu", "separated by commas: 'O2,dtype=bf16,cost=bytes,device=cpu'$"),
        ("bf16", "unknown level 'bf16'; legal: .*; a policy begins with its level: 'O1,dtype=bf16'$"),
        ("O1,module.fc3=fp32", "unknown key 'module.fc3'; .*; the nearest name is 'modules.fc3'$"),
        ("O1,op.softmax=fp32", "unknown key 'op.softmax'; .*; the nearest name is 'ops.softmax'$"),
        ("O1,modules.0=fp16", "unknown modules.0 'fp16'; legal: low, fp32, keep; the nearest name is 'low'$"),
        ("O1,dtype=fp8", "dtype 'fp8' is not a low dtype; legal: fp16, bf16.*nearest name is 'fp16'"),
        ("O1,dtype=float32", "dtype 'float32' is not a low dtype"),
        ("O1,device=gpu", f"unknown device 'gpu'; legal: {', '.join(DEVICES)}; the nearest name is 'cuda'$"),
        ("O1,device=xla", f"unknown device 'xla'; legal: {', '.join(DEVICES)}$"),
        ("O1,dtpe=fp16", "unknown key 'dtpe'; legal: dtype, .*ops.NAME; the nearest name is 'dtype'"),
        ("O1,cost=time", "unknown cost 'time'; legal: bytes, measured"),
        ("O1,output_dtype=fp16", "unknown output_dtype 'fp16'; legal: original, autocast, low"),
        ("O1,unknown_ops=fp16", "unknown unknown_ops 'fp16'; legal: autocast, keep, fp32, error"),
        ("O1,share_casts=maybe", "unknown share_casts 'maybe'; legal: always, weights, never"),
        ("O1,modules.fc3=fp23", "unknown modules.fc3 'fp23'; legal: low, fp32, keep; the nearest name is 'fp32'"),
        ("O1,dtype", "'dtype' is not KEY=VALUE"),
        ("O1,", "'' is not KEY=VALUE"),
        ("O1,modules.=fp32", "modules: the key '' is empty"),
        ("O1,dtype=fp16,dtype=bf16", "'dtype' is given twice"),
        ("O1,modules.a=fp32,modules.a=low", "modules.a is given twice, as 'fp32' and as 'low'"),
        ("dtype=fp16", "unknown level 'dtype=fp16'.*begins with its level: 'O1,dtype=fp16'$"),
    ],
)
def test_parse_refuses_and_says_what_is_legal(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy.parse(text)


def test_a_level_given_as_an_argument_is_told_its_zero_too() -> None:
    with pytest.raises(PolicyError, match=r"with the letter O: 'O2'$"):
        Policy("02")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({int: "fp32"}, "int is not a module type"),
        ({3: "fp32"}, "3 is not a module path, a glob or a module type"),
        ({"a,b": "fp32"}, "the key 'a,b' is empty or holds one of"),
        (7, "modules must map names to 'low', 'fp32' or 'keep', got 7"),
        ("fc3", "modules must map names to 'low', 'fp32' or 'keep', got 'fc3'"),
    ],
)
def test_bad_module_overrides_are_refused(overrides: object, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy(modules=overrides)  # type: ignore[arg-type]


def test_of_refuses_another_type() -> None:
    with pytest.raises(PolicyError, match=r"such as \"O1,dtype=bf16\", .*, not torch.float16 \(dtype\)"):
        Policy.of(torch.float16)  # type: ignore[arg-type]


def colour_of(policy: Policy, stack: Stack = STACK) -> str | None:
    override = module_override(policy, stack)
    return override.colour if override else None


NORM: Stack = [("norm", type_names(Norm))]


@pytest.mark.parametrize(
    ("overrides", "stack", "colour"),
    [
        # A glob covers the module and its submodules, within its segments.
        *(({key: "low"}, STACK, "low") for key in ("blocks", "blocks.0", "blocks.0.norm1", "blocks.*", "*.0", "*")),
        ({"blocks.*.norm*": "low"}, STACK, "low"),
        *(({key: "low"}, STACK, None) for key in ("block", "blocks.1", "blocks.0.norm", "norm1", "blocks.?")),
        *(({key: "low"}, STACK, None) for key in ("*.norm1", "blocks.*norm1")),
        # A type covers the module, its submodules and derived types, by the names that a capture writes too.
        *(({kind: "low"}, STACK, "low") for kind in (nn.LayerNorm, nn.TransformerEncoderLayer, nn.Module)),
        ({nn.LayerNorm: "low"}, [("norm", ("torch.nn.modules.normalization.LayerNorm",))], "low"),
        ({nn.LayerNorm: "low"}, NORM, "low"),
        # Which of two wins: path over type, the longer literal prefix, the inner type, the derived type.
        ({"*": "low", nn.LayerNorm: "fp32"}, STACK, "low"),
        ({"blocks.*.norm1": "low", "blocks.0": "fp32"}, STACK, "fp32"),
        ({nn.TransformerEncoderLayer: "low", nn.LayerNorm: "fp32"}, STACK, "fp32"),
        ({nn.LayerNorm: "low", Norm: "fp32"}, NORM, "fp32"),
        ({"blocks.*": "low", "blocks.*.norm1": "low"}, STACK, "low"),
        # The root is covered by its type alone.
        ({"*": "low"}, STACK[:1], None),
        ({"models.Net": "low"}, STACK[:1], "low"),
    ],
)
def test_which_override_covers_a_module(overrides: dict[object, str], stack: Stack, colour: str | None) -> None:
    assert colour_of(Policy(modules=list(overrides.items())), stack) == colour


def test_equal_rank_and_different_colours_are_refused() -> None:
    policy = Policy(modules={"blocks.*": "low", "blocks.*.norm1": "fp32"})
    with pytest.raises(PolicyError, match=r"modules.blocks.\*=low and modules.blocks.\*.norm1=fp32 have equal rank"):
        module_override(policy, STACK)


def test_op_override_is_found_by_canonical_name() -> None:
    policy = Policy(ops={"softmax": "low"})
    assert op_override(policy, "softmax") == Override("op", "softmax", "low")
    assert op_override(policy, "log_softmax") is None


def test_beaten_override_counts_as_used() -> None:
    policy = Policy(modules={"blocks.0": "low", nn.LayerNorm: "fp32"}, ops={"softmax": "low"})
    check_used(policy, [STACK], ["softmax", "linear"])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy(modules={"blocks.0.norm2": "low"}), "modules.blocks.0.norm2=low .* nearest name is 'blocks.0.norm1'"),
        (Policy(modules={nn.GroupNorm: "low"}), "modules.torch.nn.GroupNorm=low .* nearest name is 'torch.nn.LayerN"),
        (Policy(ops={"softmx": "low"}), "ops.softmx=low matches no op of this model; the nearest name is 'softmax'"),
        (Policy(ops={"conv2d": "low"}), r"ops\.conv2d=low matches no op of this model$"),
    ],
)
def test_override_that_matches_nothing_names_the_nearest(policy: Policy, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        check_used(policy, [STACK], ["softmax", "linear"])


@pytest.mark.parametrize(
    ("key", "matched", "missed"),
    [
        ("blocks.*.attn", ["blocks.0.attn", "blocks.10.attn.q"], ["blocks.attn", "blocks.0.attn2", "blocks.0.1.attn"]),
        ("a*b*c", ["abc", "aXbYc", "abcbc", "abbc.sub"], ["abcb", "a.bc", "ab", "xabc"]),
        ("*b", ["b", "ab", "abb", "bab.x"], ["ba", "a.b"]),
        ("*.a*a", ["x.aa", "x.aXa.y", ".aa"], ["x.a", "aa"]),
        ("**", ["a", "a.b"], []),
        ("a*", ["a", "abc.d"], ["ba"]),
        ("l(1)*[x]", ["l(1)[x]", "l(1)y[x]"], ["l1x"]),
    ],
)
def test_a_star_stands_for_anything_within_a_segment(key: str, matched: list[str], missed: list[str]) -> None:
    policy = Policy(modules={key: "low"})
    assert [path for path in (*matched, *missed) if colour_of(policy, [(path, ())])] == matched


def test_a_glob_of_many_stars_is_matched_in_linear_time() -> None:
    policy = Policy(modules={"a*" * 24 + "b": "low"})
    start = time.perf_counter()
    assert colour_of(policy, [("a" * 4000, ())]) is None
    assert colour_of(policy, [("a" * 4000 + "b", ())]) == "low"
    assert time.perf_counter() - start < 2
