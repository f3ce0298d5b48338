"""Planning for hardware that is not there: descriptions in files, counted operations, models of which some blocks run, plans."""

from __future__ import annotations

import copy
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from benchmarks.papers.families import gpt2_config, gpt2_parameters, most_layers
from protrain import _core
from protrain.dryrun import dryrun
from protrain.dryrun.dryrun import dry_run
from protrain.dryrun.phases import DryRun
from protrain.dryrun.repetition import N_RUN, dry_run_alike
from protrain.errors import BudgetError, PlanError
from protrain.model.blocks import find_blocks
from protrain.model.layout import describe, pack
from protrain.planner import offline
from protrain.planner.hardware import Disk, Hardware, load_hardware, shipped_hardware
from protrain.planner.offline import (
    counted_times,
    plan_for,
    plan_offline,
    profile_offline,
)
from protrain.planner.profiles import Profile

transformers = pytest.importorskip("transformers")

GIB = 1 << 30


def small_gpt2(layers: int = 4, **more: Any) -> Any:
    sizes = {"n_embd": 256, "n_head": 4, "vocab_size": 1000, "n_positions": 256, "bos_token_id": 0, "eos_token_id": 0}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2Config(n_layer=layers, **{**sizes, **none, **more})


def small_llama(layers: int, **more: Any) -> Any:
    return transformers.LlamaConfig(hidden_size=256, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
                                    intermediate_size=700, vocab_size=1000, **more)  # fmt: skip


def small_gemma2(layers: int) -> Any:
    return transformers.Gemma2Config(hidden_size=256, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
                                     intermediate_size=700, vocab_size=1000, head_dim=64)  # fmt: skip


def tiny_hardware(memory_bytes: int, host_bytes: int, n_devices: int = 1) -> Hardware:
    """The 3090s with so much less memory."""
    found = load_hardware("rtx3090x4", n_devices=n_devices)
    assert found.host is not None
    return replace(
        found,
        device=replace(found.device, memory_bytes=memory_bytes, reserved_bytes=0),
        host=replace(found.host, memory_bytes=host_bytes, reserved_bytes=0),
    )


# ---- descriptions ----

TEXT = """
name = "two"
n_devices = 2
[device]
memory_bytes = 1_000_000_000
reserved_bytes = 0
memory_bytes_per_second = 900e9
operation_seconds = 4e-6
flops_share = 0.5
flops_per_second = { bf16 = 70e12 }
[host]
memory_bytes = 2_000_000_000
reserved_bytes = 100
memory_bytes_per_second = 100e9
update_bytes_per_second = 30e9
[link]
upload_bytes_per_second = 60e9
offload_bytes_per_second = 10e9
overlap = 2.0
[gather]
bytes_per_second = 7e9
[disk]
read_bytes_per_second = 4e9
write_bytes_per_second = 2e9
overlap = 1.5
capacity_bytes = 1_000_000_000_000
[drag]
upload_seconds_per_byte = 0.0
offload_seconds_per_byte = 0.0
gather_seconds_per_byte = 0.0
disk_read_seconds_per_byte = 1e-11
disk_write_seconds_per_byte = 0.0
update_seconds_per_byte = 0.0
stash_seconds_per_byte = 2e-11
"""


def read(folder: Path, text: str, **arguments: Any) -> Hardware:
    file = folder / "two.toml"
    file.write_text(text)
    return load_hardware(file, **arguments)


def test_what_devices_share_is_divided(tmp_path: Path) -> None:
    hardware = read(tmp_path, TEXT)
    machine = hardware.machine(2, 12)
    assert (hardware.device_bytes, hardware.host_bytes) == (1_000_000_000, 1_999_999_900)
    assert machine.upload.bytes_per_second == 50e9  # half of what host memory carries; the link would carry more
    assert machine.offload.bytes_per_second == 10e9
    assert machine.gather.bytes_per_second == 7e9
    assert (machine.disk_read.bytes_per_second, machine.disk_write.bytes_per_second) == (2e9, 1e9)
    assert machine.update.bytes_per_second == 15e9
    assert (machine.link_overlap, machine.disk_overlap) == (2.0, 1.5)
    assert (machine.disk_read.drag_seconds_per_byte, machine.stash_drag_seconds_per_byte) == (1e-11, 2e-11)
    assert machine.step_update_bytes_per_second == pytest.approx(900e9 * 14 / 30)
    assert hardware.device.flops("bf16", "two") == 35e12
    one = read(tmp_path, TEXT, n_devices=1).machine(2, 12)
    assert (one.update.bytes_per_second, one.disk_read.bytes_per_second, one.gather.bytes_per_second) == (30e9, 4e9, 0.0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n_devices = 2", "n_devices = 2\ncolour = 1", r"the file has an unknown key 'colour'; known are name, n_devices,"),
        ("overlap = 2.0", "overlap = 2.0\nlanes = 3", r"\[link\] has an unknown key 'lanes'; known are upload_bytes_per_second,"),
        ("bf16 = 70e12", "int8 = 1", r"\[device.flops_per_second\] has an unknown key 'int8'; known are fp32, bf16, fp16"),
        ("flops_share = 0.5\n", "", r"\[device\] lacks flops_share; known keys are"),
        ('name = "two"\n', "", r"the file lacks name; known keys are"),
        ("n_devices = 2", "n_devices = 2.5", r"n_devices is 2.5; give a whole number, 1 or more"),
        ("n_devices = 2", "n_devices = 0", r"n_devices is 0; it must be 1 or more"),
        ("n_devices = 2", "n_devices = true", r"n_devices is True; give a whole number"),
        ("memory_bytes = 2_000_000_000", 'memory_bytes = "2GB"', r"\[host\] memory_bytes is '2GB'; give a whole number"),
        ("read_bytes_per_second = 4e9", "read_bytes_per_second = -4e9", r"\[disk\] read_bytes_per_second is -4.*1 or more"),
        ("update_bytes_per_second = 30e9", "update_bytes_per_second = nan", r"\[host\] update_bytes_per_second is nan; it must"),
        ("flops_share = 0.5", "flops_share = 1.5", r"\[device\] flops_share is 1.5; it must be more than 0 and at most 1"),
        ("flops_share = 0.5", "flops_share = 1e-300", r"\[device\] flops_share is 1e-300; of the peak of bf16 that is less"),
        ("bf16 = 70e12", "bf16 = 1e-300", r"\[device.flops_per_second\] bf16 is 1e-300; it must be 1 or more"),
        ("overlap = 1.5", "overlap = 0.5", r"\[disk\] overlap is 0.5; it must be 1 to 2"),
        ("upload_seconds_per_byte = 0.0", "upload_seconds_per_byte = -1", r"\[drag\] upload_seconds_per_byte is -1; .*0 or more"),
        ("upload_seconds_per_byte = 0.0", "upload_seconds_per_byte = 1", r"\[drag\] upload_seconds_per_byte is 1; .*most 1e-06"),
        ("reserved_bytes = 0", "reserved_bytes = 1_000_000_000", r"\[device\] reserved_bytes is 1000000000; it must be less"),
        ('name = "two"', "name = 2", r"name is 2; give a name in quotes"),
        ("[gather]\nbytes_per_second = 7e9\n", "", r"the file lacks \[gather\], which 2 devices need"),
        ("flops_per_second = { bf16 = 70e12 }", "flops_per_second = 7e12", r"\[device.flops_per_second\] is 7.*; give a table"),
        ("[device]", "[device", r"it is not TOML: "),
    ],
)  # fmt: skip
def test_a_wrong_description_is_refused_in_one_line_that_names_file_and_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in TEXT
    with pytest.raises(PlanError, match=r"two\.toml: " + message) as refused:
        read(tmp_path, TEXT.replace(old, new, 1))
    assert "\n" not in str(refused.value)


def test_a_host_and_its_link_come_together(tmp_path: Path) -> None:
    link = TEXT[TEXT.index("[link]") : TEXT.index("[gather]")]
    host = TEXT[TEXT.index("[host]") : TEXT.index("[link]")]
    with pytest.raises(PlanError, match=r"\[host\] is there without \[link\]"):
        read(tmp_path, TEXT.replace(link, ""))
    with pytest.raises(PlanError, match=r"\[link\] is there without \[host\]"):
        read(tmp_path, TEXT.replace(host, ""))
    with pytest.raises(PlanError, match=r"\[link\] is 7; it must be a table"):
        read(tmp_path, "link = 7" + TEXT.replace(link, ""))
    with pytest.raises(PlanError, match=r"n_devices is 2 without \[host\]"):
        read(tmp_path, TEXT.replace(host, "").replace(link, ""))


def test_hardware_is_a_name_or_a_file_that_is_there(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PlanError, match=r"hardware is 'b200', which cannot be read: No such.*a100x4, cpu, rtx3090x4, v100x8"):
        load_hardware("b200")
    for endless in ("/dev/zero", tmp_path / "pipe"):
        with pytest.raises(PlanError, match=r"which cannot be read: it is no regular file; give the path of a TOML file"):
            load_hardware(endless)
    with pytest.raises(PlanError, match=r"n_devices is 3; .*two\.toml has 2, give 1 to 2"):
        read(tmp_path, TEXT, n_devices=3)
    with pytest.raises(PlanError, match=r"cpu\.toml: \[device.flops_per_second\] has no fp16, only bf16, fp32"):
        load_hardware("cpu").device.flops("fp16", "cpu.toml")


@pytest.mark.parametrize("name", ["a100x4", "cpu", "rtx3090x4", "v100x8"])
def test_shipped_descriptions_load(name: str) -> None:
    assert name in shipped_hardware()
    hardware = load_hardware(name)
    assert hardware.source == f"{name}.toml"
    assert hardware.device_bytes >= 20 * GIB
    machine = hardware.machine(2, 12)
    assert machine.step_update_bytes_per_second > 0
    assert (machine.upload.bytes_per_second > 0) == (hardware.host_bytes > 0) == (name != "cpu")
    assert (machine.disk_read.bytes_per_second > 0) == (name == "cpu")
    assert (machine.gather.bytes_per_second > 0) == (hardware.n_devices > 1)


# ---- counting ----


def test_operations_of_a_gpt2_are_those_of_the_closed_form() -> None:
    hidden, batch, seq = 256, 3, 128
    tokens = batch * seq
    hardware = load_hardware("a100x4")
    profile = profile_offline(small_gpt2(3), hardware, batch=batch, seq=seq)
    forward = 2 * 12 * hidden * hidden * tokens
    causal = 2 * tokens * seq * hidden  # half of two products of scores' size
    for phase, (compute, again) in zip(profile.run.phases, profile.times.phases, strict=True):
        between = phase.operations * hardware.device.operation_seconds
        moving = phase.moved_bytes / hardware.device.memory_bytes_per_second
        assert compute == pytest.approx(max(phase.flops / (312e12 * hardware.device.flops_share), moving) + between)
        if phase.block < 0:
            assert again == 0.0
        elif phase.backward:
            assert phase.flops == 2 * forward + 5 * causal // 2
            assert phase.again_flops == forward * 8 // 12 + causal  # the last product's result is not saved
            moving = phase.again_moved_bytes / hardware.device.memory_bytes_per_second
            computing = phase.again_flops / (312e12 * hardware.device.flops_share)
            assert again == pytest.approx(max(computing, moving) + phase.again_operations * hardware.device.operation_seconds)
            assert 0.6 * profile.times.phases[1 + phase.block][0] < again < 0.95 * profile.times.phases[1 + phase.block][0]
        else:
            assert (phase.flops, again) == (forward + causal, 0.0)
    head = 3 * 2 * tokens * 1000 * hidden
    assert sum(phase.flops for phase in profile.run.phases) == 3 * (3 * forward + 7 * causal // 2) + head
    with pytest.raises(PlanError, match=r"v100x8\.toml: \[device.flops_per_second\] has no bf16, only fp16, fp32"):
        counted_times(profile.run, load_hardware("v100x8"), "bf16")
    assert counted_times(profile.run, load_hardware("v100x8")).compute_seconds > profile.times.compute_seconds


def both_ways(config: Any, dtype: torch.dtype, chunk_bytes: int) -> tuple[DryRun, int, DryRun]:
    """From a few blocks, how many ran, and from all."""
    model = offline._built(config, dtype)
    blocks = find_blocks(model)
    chunks = pack(describe(model.parameters(), [block for _, block in blocks]), chunk_bytes)
    ids = torch.empty((2, 128), dtype=torch.long, device="meta")
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
    few, n_run = dry_run_alike(model, kwargs, blocks, chunks, round_bytes=_core.rounded_bytes)
    chunk_of = {id(p): chunk for p, (chunk, _) in zip(model.parameters(), chunks.places, strict=True)}
    modules = [block for _, block in blocks]
    return few, n_run, dry_run(model, (), kwargs, modules, chunk_of, round_bytes=_core.rounded_bytes)


@pytest.mark.parametrize(
    ("config", "dtype", "chunk_bytes"),
    [
        (small_gpt2(9), torch.bfloat16, 2 << 20),
        (small_gpt2(9), torch.bfloat16, 256 << 10),  # blocks cut into several chunks
        (small_gpt2(7, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1), torch.float32, 4 << 20),
        (small_llama(8), torch.bfloat16, 2 << 20),
    ],
)
def test_a_dry_run_of_five_blocks_says_what_one_of_all_says(config: Any, dtype: torch.dtype, chunk_bytes: int) -> None:
    few, n_run, whole = both_ways(config, dtype, chunk_bytes)
    assert n_run == N_RUN
    assert asdict(few) == asdict(whole)


@pytest.mark.parametrize(
    ("config", "chunk_bytes", "layers"),
    [
        (small_gemma2(8), 2 << 20, 8),  # every second block is of another kind
        (small_gpt2(8), 8 << 20, 8),  # several blocks share a chunk
        (small_gpt2(5), 2 << 20, 5),
    ],
)
def test_blocks_that_are_not_alike_all_run(config: Any, chunk_bytes: int, layers: int) -> None:
    few, n_run, whole = both_ways(config, torch.bfloat16, chunk_bytes)
    assert n_run == layers
    assert few == whole


def test_one_frozen_block_in_the_middle_is_noticed() -> None:
    model = offline._built(small_gpt2(9), torch.bfloat16)
    for p in model.transformer.h[6].parameters():
        p.requires_grad_(False)
    blocks = find_blocks(model)
    chunks = pack(describe(model.parameters(), [block for _, block in blocks]), 2 << 20)
    ids = torch.empty((1, 32), dtype=torch.long, device="meta")
    run, n_run = dry_run_alike(model, {"input_ids": ids, "labels": ids}, blocks, chunks, round_bytes=_core.rounded_bytes)
    assert n_run == 9
    assert len(run.complete_phase) == chunks.n_chunks - 1


class Asking(torch.nn.Linear):
    """Its forward depends on values."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() if bool((input_ids > 0).all()) else self.bias.sum()


def test_a_gpu_holds_no_scores_and_everything_is_put_back() -> None:
    kept = torch.nn.functional.scaled_dot_product_attention, dryrun.workspace_bytes, dict(flop_registry)
    gpu, cpu = load_hardware("a100x4"), load_hardware("cpu")
    plain = profile_offline(small_gpt2(), gpu, batch=2, seq=256).run
    dropped = profile_offline(small_gpt2(attn_pdrop=0.1), gpu, batch=2, seq=256).run
    assert dropped == plain
    of_cpu = profile_offline(small_gpt2(attn_pdrop=0.1), cpu, batch=2, seq=256).run
    scores = 2 * 4 * 256 * 256 * 2
    assert of_cpu.keep_peak_bytes >= plain.keep_peak_bytes + 4 * scores
    with pytest.raises(PlanError, match="its memory cannot be foreseen"):
        profile_offline(Asking(), gpu, seq=16)
    assert (torch.nn.functional.scaled_dot_product_attention, dryrun.workspace_bytes, dict(flop_registry)) == kept


# ---- plans ----


def test_a_model_and_its_config_have_one_plan_and_the_model_stays_as_it_is() -> None:
    model = transformers.GPT2LMHeadModel(small_gpt2())
    before = copy.deepcopy(model.state_dict())
    hardware = tiny_hardware(64 << 20, GIB)
    plan = plan_offline(model, hardware, batch=2, seq=128)
    assert plan == plan_offline(small_gpt2(), hardware, batch=2, seq=128)
    with torch.device("meta"):
        assert plan == plan_offline(transformers.GPT2LMHeadModel(small_gpt2()), hardware, batch=2, seq=128)
    assert plan.step_seconds > 0.0
    assert plan.peak_bytes <= 64 << 20
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert list(before) == list(model.state_dict())


def test_plans_are_deterministic_and_a_profile_keeps_all_of_them() -> None:
    hardware = tiny_hardware(48 << 20, GIB)
    profile = profile_offline(small_gpt2(8), hardware, batch=2, seq=256)
    again = Profile.from_json(profile.to_json())
    assert again == profile
    for memory in ("24MiB", "32MiB", "48MiB"):
        plan = plan_for(profile, hardware, memory=memory)
        assert plan_for(again, hardware, memory=memory) == plan
        assert plan_for(again, hardware, memory=memory).forecast == plan.forecast
        assert type(plan).from_json(plan.to_json()) == plan


def test_all_that_fits_stays_on_the_device() -> None:
    a100 = load_hardware("a100x4", n_devices=1)
    plan = plan_offline(small_gpt2(), a100, batch=2, seq=128)
    assert set(plan.block_modes) == {"keep"}
    assert (plan.n_persist, plan.host_bytes, plan.disk_bytes) == (plan.n_chunks, 0, 0)
    states = 14 * gpt2_parameters_of(small_gpt2())
    assert states <= plan.persistent_bytes <= 1.02 * states + plan.n_chunks * 7 * 4096
    half = plan_offline(small_gpt2(), a100, batch=2, seq=128, precision="fp32")
    assert half.persistent_bytes <= 12 * gpt2_parameters_of(small_gpt2()) * 1.02 + plan.n_chunks * 3 * 4096


def test_more_memory_of_several_devices_is_not_slower() -> None:
    """Where everything fits each of them would update all of it, and gradients move all the same."""
    found = load_hardware("rtx3090x4")
    profile = profile_offline(small_gpt2(), found, batch=2, seq=128)
    seconds = [plan_for(profile, found, memory=f"{size}MiB").step_seconds for size in (64, 128, 256, 1024, 16384)]
    assert all(later <= 1.005 * min(seconds[: number + 1]) for number, later in enumerate(seconds[1:]))


def gpt2_parameters_of(config: Any) -> int:
    model = offline._built(config, torch.float32)
    return sum(p.numel() for p in model.parameters())


def test_chunks_go_to_the_host_and_ranks_share_them() -> None:
    one, two = tiny_hardware(24 << 20, GIB), tiny_hardware(24 << 20, GIB, n_devices=2)
    profile = profile_offline(small_gpt2(12), one, batch=1, seq=128)
    modes = ["checkpoint"] * 12
    alone = plan_for(profile, one, block_modes=modes)
    shared = plan_offline(small_gpt2(12), two, batch=1, seq=128, block_modes=modes)
    assert alone.n_persist < alone.n_chunks
    assert (alone.disk_bytes, shared.disk_bytes) == (0, 0)
    sizes = pack(profile.parameters, profile.chunk_bytes).sizes
    homes, of_two = 7 * sum(sizes[alone.n_persist :]), 7 * sum(sizes[shared.n_persist :])
    ring_bytes = alone.host_bytes - homes
    assert ring_bytes >= 0
    assert alone.n_host == alone.n_chunks - alone.n_persist
    assert shared.host_bytes - ring_bytes == pytest.approx(of_two / 2, rel=0.05)


def test_updates_pass_through_memory_of_the_host() -> None:
    """As over a device that is here: no budget of the device has the ring, and homes share the host with it."""
    profile = profile_offline(small_gpt2(12), tiny_hardware(24 << 20, GIB), memory="24MiB", batch=1, seq=128)
    modes = ["checkpoint"] * 12
    roomy, narrow = (plan_for(profile, tiny_hardware(24 << 20, host << 20), block_modes=modes) for host in (1024, 192))
    for plan in (roomy, narrow):
        assert plan.n_persist < plan.n_chunks
        assert plan.ring_bytes == 0
        assert (plan.n_persist, plan.peak_bytes) == (roomy.n_persist, roomy.peak_bytes)
    homes = 7 * sum(pack(profile.parameters, profile.chunk_bytes).sizes[roomy.n_persist :])
    assert homes + 8 * 6 * (2 << 20) == roomy.host_bytes  # six pieces of eight arrays
    assert homes < narrow.host_bytes < roomy.host_bytes
    with pytest.raises(BudgetError, match=r"host_memory of 1.00 MiB does not hold what updates pass through: give at least 2.00"):
        plan_offline(small_gpt2(12), replace(tiny_hardware(24 << 20, 1 << 20), disk=Disk(2e9, 2e9, 1.0, GIB)), batch=1, seq=128)


def test_a_plan_stays_within_the_disk() -> None:
    """The fastest plan leaves to a fast disk what it can; on a smaller one more chunks stay, and it takes longer."""

    def with_disk(memory_mib: int, capacity_bytes: int) -> Hardware:
        return replace(tiny_hardware(memory_mib << 20, 64 << 20), disk=Disk(5e10, 5e10, 1.0, capacity_bytes))

    profile = profile_offline(small_gpt2(12), with_disk(160, GIB), batch=16, seq=128)
    found = [plan_for(profile, with_disk(160, GIB))]
    assert found[0].disk_bytes > 100 << 20
    for part in (0.99, 0.7, 0.5, 0.1):
        capacity = int(part * found[0].disk_bytes)
        found.append(plan_for(profile, with_disk(160, capacity)))
        assert found[-1].disk_bytes <= capacity
    for roomy, narrow in zip(found, found[1:], strict=False):
        assert narrow.disk_bytes < roomy.disk_bytes
        assert narrow.n_persist + narrow.n_host >= roomy.n_persist + roomy.n_host
        assert 0.995 * roomy.step_seconds < narrow.step_seconds < 1.1 * roomy.step_seconds


def test_a_refusal_names_the_smallest_disk() -> None:
    hardware = replace(tiny_hardware(96 << 20, 64 << 20, n_devices=2), disk=Disk(5e10, 5e10, 1.0, 32 << 20))
    with pytest.raises(BudgetError, match=r"disk: .* do not fit 32.00 MiB of disk; the smallest disk that works is") as refused:
        plan_offline(small_gpt2(24), hardware, batch=16, seq=128)
    smallest = refused.value.smallest_bytes
    assert (refused.value.budget_bytes, refused.value.needed_bytes) == (32 << 20, smallest)
    profile = profile_offline(small_gpt2(24), hardware, batch=16, seq=128)
    of_that_size = replace(hardware, disk=Disk(5e10, 5e10, 1.0, smallest))
    assert 2 * plan_for(profile, of_that_size).disk_bytes == smallest
    with pytest.raises(BudgetError, match="disk: "):
        plan_for(profile, replace(hardware, disk=Disk(5e10, 5e10, 1.0, smallest - 1)))


def test_what_fits_no_tier_is_refused(tmp_path: Path) -> None:
    hardware = tiny_hardware(24 << 20, 32 << 20)
    with pytest.raises(BudgetError, match="host_memory: a step of this batch fits a device, but its states do not fit 32"):
        plan_offline(small_gpt2(24), hardware, batch=1, seq=128)
    with pytest.raises(BudgetError) as refused:
        plan_offline(small_gpt2(24), hardware, memory="1MiB", batch=1, seq=128)
    assert refused.value.smallest_bytes > 1 << 20
    with_disk = replace(hardware, disk=Disk(2e9, 2e9, 1.0, GIB))
    plan = plan_offline(small_gpt2(24), with_disk, batch=1, seq=128)
    assert 0 < plan.disk_bytes <= GIB
    assert plan.host_bytes <= 32 << 20


@pytest.mark.parametrize("layers", [6, 12])
def test_more_memory_never_loses_a_plan(layers: int) -> None:
    profile = profile_offline(small_gpt2(layers), tiny_hardware(GIB, GIB), memory="24MiB", batch=1, seq=128)

    def works(memory_bytes: int, host_bytes: int) -> bool:
        try:
            plan = plan_for(profile, tiny_hardware(memory_bytes, host_bytes))
        except BudgetError:
            return False
        assert plan.peak_bytes <= memory_bytes
        assert plan.host_bytes <= host_bytes
        return True

    grid = [[works(memory << 20, host << 20) for memory in range(4, 132, 8)] for host in range(16, 300, 28)]
    for row in grid:
        assert row == sorted(row)
    for column in zip(*grid, strict=True):
        assert list(column) == sorted(column)
    assert {value for row in grid for value in row} == {False, True}


def test_the_largest_model_grows_with_memory() -> None:
    def largest(memory: int, host: int) -> int:
        found = most_layers(small_gpt2, tiny_hardware(memory << 20, host << 20), batch=1, seq=64)
        return 0 if found is None else found[0]

    assert largest(1, 64) == 0
    found = [largest(24, 64), largest(24, 128), largest(48, 128)]
    assert found == sorted(found)
    assert found[0] < found[1]
    assert 0 < found[0] * 12 * 256 * 256 * 14 <= (64 + 24) << 20


def test_given_modes_are_used() -> None:
    modes = ["checkpoint", "keep", "swap", "checkpoint_swap"]
    plan = plan_offline(small_gpt2(), tiny_hardware(64 << 20, GIB), batch=2, seq=128, block_modes=modes)
    assert list(plan.block_modes) == modes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch is 0; give a whole number, at least 1"),
        ({"seq": -5}, "seq is -5; give a whole number, at least 1"),
        ({"precision": "fp8"}, "precision is 'fp8'; allowed are 'fp32', 'mixed', 'bf16'"),
        ({"memory": "90GiB"}, r"memory is '90GiB'; a device of a100x4.toml has 78.00 GiB"),
        ({"host_memory": "2TiB"}, r"host_memory is '2TiB'; a100x4.toml has 992 GiB"),
        ({"n_devices": 5}, "n_devices is 5; a100x4.toml has 4, give 1 to 4"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_offline(small_gpt2(), "a100x4", **{"batch": 1, "seq": 64, **arguments})


def test_a_machine_of_one_device_is_asked_for_that_one() -> None:
    with pytest.raises(ValueError, match=r"n_devices is 2; cpu\.toml has 1, give 1$"):
        plan_offline(small_gpt2(), "cpu", batch=1, seq=64, n_devices=2)


def test_a_thing_that_is_no_model_is_named() -> None:
    with pytest.raises(TypeError, match=r"model is 'gpt2'; give a torch\.nn\.Module, or a config of transformers"):
        plan_offline("gpt2", "cpu", seq=64)


# ---- families ----


def test_parameters_are_counted_as_the_model_has_them() -> None:
    assert gpt2_parameters_of(gpt2_config(2048, 2)) == gpt2_parameters(2048, 2)
