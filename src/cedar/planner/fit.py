"""What fits on a machine: where each class of weights lives, the largest context and concurrency.

Memory is counted per device. The first tier (an accelerator's memory, or RAM) must hold what every
token needs: resident weights, sequences, scratch and the allowance. Other classes go to the fastest
tier with room, in the order of how often they are read. RAM left over caches experts on the SSD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cedar.errors import DoesNotFitError, UsageError
from cedar.planner.expression import Number
from cedar.planner.hardware import Machine
from cedar.planner.ledger import Kind, Ledger
from cedar.planner.weights import CAN_LIVE, Place, WeightClass
from cedar.units import format_bytes

#: Most read first.
_ORDER: tuple[WeightClass, ...] = ("routed_experts", "embed", "draft", "vision", "engram_tables")

#: Contexts at which the possible concurrency is tabulated.
CONTEXTS = (8_192, 131_072, 1_048_576)

_SEQUENCES = "first tier: memory - weights - scratch - allowance"


@dataclass(frozen=True, slots=True)
class Tier:
    """One level of memory: its place, its capacity (of one device for gpu) and its bandwidth."""

    place: Place
    capacity: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each class lives.

    Attributes:
        tiers: fastest first.
        homes: class -> place; None where no tier has room.
        sizes: bytes of each class at its home (of one rank on an accelerator, pinned when asked).
        fits: every class has a home and the first tier holds what it must.
        shortage: bytes missing in the first tier, or for classes that found no room.
    """

    tiers: tuple[Tier, ...]
    homes: Mapping[WeightClass, Place | None]
    sizes: Mapping[WeightClass, int]
    fits: bool
    shortage: int

    @property
    def first(self) -> Tier:
        """The tier that holds what every token needs."""
        return self.tiers[0]

    def in_place(self, place: Place) -> list[WeightClass]:
        """Classes that live there."""
        return [name for name, home in self.homes.items() if home == place]


def tiers_of(machine: Machine) -> tuple[Tier, ...]:
    """The memories of a machine, fastest first."""
    first = Tier("gpu" if machine.accelerator else "ram", machine.memory_bytes, machine.bandwidth)
    tiers = [first]
    if machine.host_memory_bytes and machine.accelerator:
        tiers.append(Tier("ram", machine.host_memory_bytes, machine.host_bandwidth))
    if machine.disk_bytes:
        tiers.append(Tier("ssd", machine.disk_bytes, machine.disk_bandwidth))
    return tuple(tiers)


def _size(ledger: Ledger, name: WeightClass, place: Place, *, pinned: bool) -> int:
    if place == "gpu":
        return int(ledger[f"rank.{name}_bytes"])
    if pinned and place == "ram" and name == "engram_tables" and "engram.pinned_bytes" in ledger:
        return int(ledger["engram.pinned_bytes"])
    return int(ledger[f"weights.{name}_bytes"])


def place(
    ledger: Ledger, machine: Machine, wanted: Mapping[WeightClass, Place], *, pinned: bool = False
) -> Placement:
    """Find a home for every class of weights.

    Args:
        wanted: classes that must live somewhere; the others go to the fastest tier with room.
        pinned: the n-gram tables in RAM are page-locked, each buffer rounded to a power of two.

    Raises:
        UsageError: a class may not live where it is wanted, or the machine has no such tier.
    """
    tiers = tiers_of(machine)
    _check_wanted(tiers, wanted, machine)
    room = {tier.place: tier.capacity for tier in tiers}
    first = tiers[0].place
    homes: dict[WeightClass, Place | None] = {"resident": first}
    sizes: dict[WeightClass, int] = {"resident": _size(ledger, "resident", first, pinned=pinned)}
    needs = ("sequences_bytes", "scratch.total_bytes", "allowance_bytes")
    room[first] -= sizes["resident"] + sum(int(ledger[name]) for name in needs)
    shortage = max(0, -room[first])
    for name in _ORDER:
        options = [wanted[name]] if name in wanted else [tier.place for tier in tiers]
        if name == "engram_tables" and name not in wanted and homes["routed_experts"] == "ssd":
            options = ["ssd"]  # RAM serves the experts better: they are read far more
        home = next(
            (p for p in options if _size(ledger, name, p, pinned=pinned) <= max(0, room[p])), None
        )
        homes[name], sizes[name] = home, _size(ledger, name, home or options[-1], pinned=pinned)
        if home is not None:
            room[home] -= sizes[name]
        else:
            shortage += sizes[name] - max(0, room[options[-1]])
    return Placement(tiers, homes, sizes, shortage == 0, shortage)


def _check_wanted(
    tiers: tuple[Tier, ...], wanted: Mapping[WeightClass, Place], machine: Machine
) -> None:
    have = [tier.place for tier in tiers]
    for name, where in wanted.items():
        allowed = [p for p in CAN_LIVE[name][0] if p in have]
        if where not in allowed:
            raise UsageError(
                f"{name} cannot live in {where} on machine {machine.name!r}; allowed: "
                f"{', '.join(allowed)} (give --host-memory or --disk to add a tier)"
            )


def add_fit(ledger: Ledger, machine: Machine, placement: Placement, *, max_context: int) -> None:
    """Add the machine's numbers, the demand on its first tier, and what else would fit.

    Args:
        max_context: longest sequence of the model (max_position_embeddings).
    """
    own = machine.kind
    counted: Kind = "derived" if own == "measured" else own
    numbers: tuple[tuple[str, str, Number, Kind], ...] = (
        ("memory_bytes", "B", machine.memory_bytes, own),
        ("bandwidth", "B/s", machine.bandwidth, own),
        ("flops", "FLOP/s", machine.flops, counted),
        ("devices", "devices", machine.devices, own),
        ("host_memory_bytes", "B", machine.host_memory_bytes, own),
        ("host_bandwidth", "B/s", machine.host_bandwidth, "given"),
        ("disk_bytes", "B", machine.disk_bytes, own),
        ("disk_bandwidth", "B/s", machine.disk_bandwidth, "given"),
    )
    for name, unit, value, kind in numbers:
        ledger.add(f"machine.{name}", value, unit, machine.title, machine.source, kind)
    ledger.add("model.max_context", max_context, "tokens", "max_position_embeddings", "config")
    prefix = "rank" if placement.first.place == "gpu" else "weights"
    here = [f"{prefix}.{name}_bytes" for name in placement.in_place(placement.first.place)]
    ledger.derive("fit.weights_bytes", " + ".join(here), "B", "classes that live in the first tier")
    ledger.derive(
        "fit.required_bytes",
        "fit.weights_bytes + sequences_bytes + scratch.total_bytes + allowance_bytes", "B",
        "demand on the first tier",
    )  # fmt: skip
    ledger.derive("fit.free_bytes", "machine.memory_bytes - fit.required_bytes", "B", _SEQUENCES)
    if placement.homes["routed_experts"] == "ssd":
        _add_cache(ledger, placement)
    _add_largest(ledger)


def _add_cache(ledger: Ledger, placement: Placement) -> None:
    """Share of the experts that the RAM left over keeps from the SSD (mapped files are cached)."""
    if placement.first.place == "ram":
        free = "fit.free_bytes"
    else:
        in_ram = [f"weights.{name}_bytes" for name in placement.in_place("ram")]
        free = " - ".join(["machine.host_memory_bytes", *in_ram])
    ledger.derive(
        "cache.routed_experts_share",
        f"max(0, min(1, ({free}) / weights.routed_experts_bytes))", "",
        "RAM left over / bytes of the experts, under uniform routing",
    )  # fmt: skip


def _add_largest(ledger: Ledger) -> None:
    """Largest context at this concurrency, and largest concurrency at this and other contexts."""
    ledger.derive(
        "fit.base_bytes",
        "fit.weights_bytes + scratch.total_bytes - scratch.logits_bytes + allowance_bytes", "B",
        "demand that depends on neither context nor concurrency",
    )  # fmt: skip
    ledger.derive(
        "fit.largest_context",
        "max(0, min(model.max_context, (machine.memory_bytes - fit.base_bytes - concurrency *"
        " (sequence_fixed_bytes + model.vocab * 4)) // max(1, concurrency * kv_block_bytes)"
        " * block_size))",
        "tokens", f"{_SEQUENCES}; whole blocks, at most the model's context",
    )  # fmt: skip
    ledger.derive(
        "fit.largest_concurrency",
        "max(0, (machine.memory_bytes - fit.base_bytes) // (sequence_bytes + model.vocab * 4))",
        "sequences", f"{_SEQUENCES}; at this request's context",
    )  # fmt: skip
    for tokens in CONTEXTS:
        if tokens <= ledger["model.max_context"]:
            ledger.derive(
                f"fit.concurrency_at.t{tokens}",
                "max(0, (machine.memory_bytes - fit.base_bytes) // (sequence_fixed_bytes"
                f" + ceil_div({tokens}, block_size) * kv_block_bytes + model.vocab * 4))",
                "sequences", f"{_SEQUENCES}; at {tokens:,} tokens each",
            )  # fmt: skip


def refusal(ledger: Ledger, machine: Machine, placement: Placement) -> DoesNotFitError:
    """The error for a plan that does not fit: a breakdown, by how much, and what would help."""
    first = placement.first
    rows = {f"{name} weights": placement.sizes[name] for name in placement.in_place(first.place)}
    rows |= {
        f"{int(ledger['concurrency']):,} x sequence": int(ledger["sequences_bytes"]),
        "scratch": int(ledger["scratch.total_bytes"]),
        "allowance": int(ledger["allowance_bytes"]),
    }
    parts = "; ".join(f"{name} {format_bytes(size)}" for name, size in rows.items())
    homeless = [name for name, home in placement.homes.items() if home is None]
    missing = "".join(
        f"; no room for {name} {format_bytes(placement.sizes[name])}" for name in homeless
    )
    help_ = [f"{format_bytes(placement.shortage)} more memory"]
    if homeless and len(placement.tiers) < 3:
        help_.append("a slower tier for them (--host-memory, --disk)")
    largest = int(ledger["fit.largest_concurrency"])
    if not homeless and 0 < largest < ledger["concurrency"]:
        help_.append(f"--concurrency {largest}")
    context = int(ledger["fit.largest_context"])
    if not homeless and 0 < context < ledger["total_tokens"]:
        help_.append(f"at most {context:,} tokens a sequence")
    return DoesNotFitError(
        f"does not fit on {machine.title}: {format_bytes(placement.shortage, 3)} short. "
        f"{first.place.upper()} of one device is {format_bytes(first.capacity)}; it needs "
        f"{parts}{missing}. "
        f"What would help: {', or '.join(help_)}"
    )
