"""What goes where: the tier of each unit's parameters, gradients and optimizer state, from byte budgets alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from outsize.planning.errors import BudgetError
from outsize.planning.layout import PAGE_ELEMENTS
from outsize.planning.sizes import format_bytes

KINDS = ("params", "grads", "states")
"""In the order in which memory is given out: bytes moved per byte stored fall in this order."""

MAX_STAGING_BYTES = 64 << 20
MIN_STAGING_BYTES = 256 << 10
MIN_SLAB_BYTES = 4 << 20
MIN_OUTBOX_BYTES = 64 << 10
GOLDEN = 0.6180339887498949
"""Its multiples, without their whole part, lie evenly between 0 and 1, however many there are (Knuth 6.4)."""
SMALLER = " or leave units= out"
"""A remedy where units are too large: then the budgets cut them."""

MIN_DEPTH, MAX_DEPTH = 3, 8
"""Slabs of staging: one being read, one being updated, one being written; more of these where they are not small."""

# Note [What one forward uses]
# A unit that a forward uses stays gathered until that forward returns. So all units with parameters of one module, and
# of the modules that call it, are in memory at once, however finely the module is cut: an LSTM of many layers needs all
# its weights, its gradients one unit after the other. They are counted together (`together`) but not joined into one
# unit, whose weights and gradients would be in memory at once: then models that train within their budget would be
# refused. The entries of an `nn.ParameterList` or `ParameterDict` are not counted: some forwards use all, some only one
# (adapters, experts). If such a forward goes above the budget, the streamer logs which units and which budget would
# hold them.
#
# A layer of several units that runs again in the backward holds all of them from then on, while the gradients of one
# after the other come (`RunAgain`).


@dataclass(frozen=True)
class UnitBytes:
    """The bytes at rest of one unit, by kind. A frozen unit has no gradients and no states."""

    name: str
    params: int
    grads: int
    states: int
    shared: int = 0
    """With several ranks, what the unit takes beside that while it is in use: its gathered parameters, where only a
    part rests here, and its gradients before they are reduced."""
    collected: int = 0
    """The latter alone."""
    sums: int = 0
    """What its gradients take beside `grads` once they are sums of several: those of 16 bits are added in fp32."""
    summed: int = 0
    """What they take of that in the computing memory before they come to rest: all on a CPU, else nothing."""
    tiles: int = 0
    """Where the unit is used in tiles: what those at work take."""
    in_place: bool = False
    """Whether its parameters can be read from files of others: on "disk" they lie there, and take no space of it."""

    swapped: int = 0
    """What its parameters take of the disk already, and give back as they come to rest there."""
    steps: int = 1
    """Of how many steps its gradients rest: two where the update is delayed."""

    @property
    def trained(self) -> bool:
        """A table has states and no gradients at rest; an optimizer may keep no states."""
        return bool(self.grads or self.states)

    @property
    def moved_grads(self) -> int:
        """What moves of its gradients in a step."""
        return self.grads // self.steps

    @property
    def total(self) -> int:
        return self.params + self.grads + self.states

    def most(self, kind: str) -> int:
        """The most bytes at rest of one kind, whatever the loop does."""
        nbytes: int = getattr(self, kind)
        return nbytes + self.sums if kind == "grads" else nbytes

    @property
    def working(self) -> int:
        """What must be in the computing memory at once when the unit is on no memory tier: weights and gradients."""
        return self.tiles or self.params + self.grads + self.summed + self.shared

    @property
    def gathered(self) -> int:
        """What the weights take while the unit is in use."""
        return self.tiles or max(self.params, self.shared - self.collected)

    @property
    def ahead(self) -> int:
        """What it takes to be fetched before its use."""
        return self.tiles or max(self.params, self.shared)

    @property
    def leaving(self) -> int:
        """What its gradients take on their way to where they rest."""
        return self.tiles or self.most("grads")


UsedTogether = Mapping[str, tuple[int, ...]]
"""The indices of the units that one module uses at once, by its name. See Note [What one forward uses]."""

NONE_TOGETHER: UsedTogether = {}


WEIGHT_TILES, TILES = 2, 5
"""Of what tiles take at work: the share of the weights, which a forward uses; less where they have 16 bits."""


class RunAgain(tuple[int, ...]):
    """Those of a layer that runs again in the backward."""


@dataclass(frozen=True)
class Budgets:
    """Bytes that may be used. `device` is None when the computation runs on the CPU; `disk` is None without one."""

    host: int
    device: int | None = None
    disk: int | None = None
    staging: int | None = None
    least_staging: int = MIN_STAGING_BYTES
    offloads: bool = False
    """Whether activations go to disk, and so through staging, wherever the state rests."""

    @property
    def staging_bytes(self) -> int:
        """Of the arena through which what rests elsewhere passes; an eighth of the host budget unless it is set."""
        if self.staging is not None:
            return self.staging
        return min(max(self.host // 8, self.least_staging), MAX_STAGING_BYTES)

    def outbox_bytes(self, units: Sequence[UnitBytes]) -> int:
        """Pinned memory through which gradients leave an accelerator: those of one unit, so that the host may be one
        unit ahead of the device; an eighth of the host budget at most."""
        largest = max((min(unit.grads, unit.leaving) for unit in units), default=0)
        return 0 if self.device is None else min(largest, max(self.host // 8, MIN_OUTBOX_BYTES))

    def passing_bytes(self, units: Sequence[UnitBytes]) -> int:
        """Host memory for gradients of an accelerator on their way to disk, of two units."""
        largest = max((unit.leaving for unit in units), default=0)
        return 0 if self.device is None else 2 * largest

    def moving_bytes(self, units: Sequence[UnitBytes], leave: bool, to_disk: Sequence[UnitBytes]) -> int:
        """Host memory beside an accelerator for what is on its way, where gradients of `units` `leave` it, and those of
        some go on to disk."""
        return self.staging_bytes + (self.outbox_bytes(units) if leave else 0) + self.passing_bytes(to_disk)

    def with_staging_for(self, working: int) -> Budgets:
        """The same with up to a quarter for staging, as far as what is at work at once leaves it."""
        if self.device is not None:
            return self
        most = min(max(self.host // 4, self.least_staging), MAX_STAGING_BYTES)
        return replace(self, staging=max(min(self.host - working, most), self.staging_bytes))

    def least_for(self, working: int) -> int:
        """The smallest budget for the computation that holds `working` bytes, in bytes of the field `computing` names.

        On a CPU staging grows with the budget.
        """
        if self.device is not None:
            return working
        return min(max(working + self.least_staging, (working - 1) * 8 // 7 + 1), working + MAX_STAGING_BYTES)

    def least_beside_free_staging(self, working: int) -> int:
        """As `least_for`, where the plan does not know of these bytes and gives staging all that it may have."""
        if self.device is not None:
            return working
        return min(max(working + self.least_staging, -(-working * 4 // 3)), working + MAX_STAGING_BYTES)

    @property
    def by_tier(self) -> dict[str, int]:
        """The budget of each tier that has one. With computation on the CPU, device and host are one "memory"."""
        found = {"memory": self.host} if self.device is None else {"device": self.device, "host": self.host}
        return found if self.disk is None else {**found, "disk": self.disk}

    def sharing(self, tier: str) -> tuple[str, ...]:
        """The tiers under the same budget as this one. With computation on the CPU, device and host are one memory."""
        return ("device", "host") if self.device is None and tier != "disk" else (tier,)

    @property
    def computing(self) -> tuple[str, int]:
        """The budget that the computation itself lives under, with the name of its field."""
        if self.device is None:
            return "host_memory", max(self.host - self.staging_bytes, 0)
        return "device_memory", self.device

    @property
    def unit_bytes(self) -> int:
        """How large a unit may be: weights, their gradients, and the next unit's weights fit, with room for more."""
        return max(self.computing[1] // 4, 1)


@dataclass(frozen=True)
class UnitTiers:
    """Where one unit rests, by kind, and the reason in words."""

    params: str
    grads: str
    states: str
    why: str

    @property
    def on_disk(self) -> bool:
        """Whether any of it is."""
        return "disk" in (self.params, self.grads, self.states)

    @property
    def stay(self) -> bool:
        """Whether all of it is where it is computed with."""
        return self.params == self.grads == self.states == "device"


def arena(staging_bytes: int, element_bytes: int) -> tuple[int, int]:
    """(bytes of a slab, slabs) of the staging arena; none where nothing is staged. At least one is read, one updated
    and one written; the more there are, the less of the arena stands still while one is updated, as long as the pieces
    that go to disk are not small."""
    if not staging_bytes:
        return slab_bytes(0, element_bytes), 0
    depth = min(max(staging_bytes // MIN_SLAB_BYTES, MIN_DEPTH), MAX_DEPTH)
    return slab_bytes(staging_bytes, element_bytes, depth), depth


def least_staging(element_bytes: int) -> int:
    """Bytes of the smallest arena for elements that take so much in staging, each with all of its arrays."""
    return max(MIN_STAGING_BYTES, MIN_DEPTH * slab_bytes(0, element_bytes))


def slab_bytes(staging_bytes: int, element_bytes: int, depth: int = MIN_DEPTH) -> int:
    """Bytes of one of `depth` slabs: a chunk's arrays lie in it side by side, at least one page of elements of each."""
    return max(staging_bytes // depth // PAGE_ELEMENTS, element_bytes) * PAGE_ELEMENTS


def used_at_once(units: Sequence[UnitBytes], indices: tuple[int, ...]) -> int:
    """Bytes of the computing memory that units take which are used together."""
    several = [units[index] for index in indices]
    gathered = [0 if unit.tiles else unit.gathered for unit in several]  # tiles are there while they are used
    if isinstance(indices, RunAgain):
        return sum(gathered) + max(unit.working - own for unit, own in zip(several, gathered, strict=True))
    return sum(gathered) + max(unit.tiles for unit in several) * WEIGHT_TILES // TILES


def most_at_once(units: Sequence[UnitBytes], together: UsedTogether) -> tuple[int, str, tuple[int, ...]]:
    """What takes most of the computing memory while at work: (bytes, its name, the units that it uses `together`, if it
    is a module with several)."""
    largest = max(units, key=lambda unit: unit.working)
    found: tuple[int, str, tuple[int, ...]] = largest.working, largest.name, ()
    for module, indices in together.items():
        needed = used_at_once(units, indices)
        if needed > found[0]:
            found = needed, module, indices
    return found


def most_at_work(units: Sequence[UnitBytes], together: UsedTogether) -> int:
    """What takes most of the computing memory while at work, a unit on its way included."""
    ahead, largest = max(unit.ahead for unit in units), max(unit.working for unit in units)
    return max(largest + ahead, most_at_once(units, together)[0])


def check_largest_unit(units: Sequence[UnitBytes], budgets: Budgets, together: UsedTogether = NONE_TOGETHER) -> None:
    """Raise `BudgetError` that names the unit, the layer or the module whose weights and gradients do not fit the
    computing budget."""
    field, room = budgets.computing
    needed, name, several = most_at_once(units, together)
    if needed <= room:
        return
    least = budgets.least_for(needed)
    extra = f" and {format_bytes(least - needed)} of staging" if budgets.device is None else ""
    what, kinds, remedy = f"unit {name!r}", "parameters and gradients", SMALLER
    if isinstance(several, RunAgain):
        what, remedy = f"layer {name!r}", " or pass activations='auto'"
        kinds = "parameters, which it holds when it runs again in the backward, and the largest gradients"
    elif several:
        what, remedy = f"module {name!r}" if name else "the model", ""
        kinds = "parameters, which one forward uses at once" + ("," if extra else "")
    given = budgets.host if budgets.device is None else room
    raise BudgetError(
        f"{what} needs {format_bytes(needed)} for its {kinds}{extra}, but {field} is {format_bytes(given)}; "
        f"raise {field} to at least {format_at_least(least)}{remedy}",
        field,
        least,
        given,
    )


def format_at_least(nbytes: int) -> str:
    """`format_bytes`, but never rounded down, and with digits enough to be nearly the least: "288.0 KiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 4 * 1024**power or power == 1:
            tenths = -(-nbytes * 10 // 1024**power)
            return f"{tenths // 10}.{tenths % 10} {unit}"
    raise AssertionError("KiB serve every size")


def resting_bytes(units: Sequence[UnitBytes], tiers: Sequence[UnitTiers], on: Collection[str]) -> int:
    """The most bytes at rest on these tiers."""
    pairs = zip(units, tiers, strict=True)
    return sum(unit.most(kind) for unit, each in pairs for kind in KINDS if getattr(each, kind) in on)


def accumulates_whole(units: Sequence[UnitBytes], tiers: Sequence[UnitTiers], budgets: Budgets) -> bool:
    """Whether the whole gradients of all units fit into the computing memory, beside what rests there and a unit at
    work: then ranks that do not synchronise add them up, each its own."""
    resting = resting_bytes(units, tiers, budgets.sharing("device"))
    at_work = max(unit.working for unit in units)
    return resting + at_work + sum(unit.collected for unit in units) <= budgets.computing[1]


def place(
    units: Sequence[UnitBytes], budgets: Budgets, wanted: dict[str, str], together: UsedTogether = NONE_TOGETHER
) -> tuple[UnitTiers, ...]:
    """Choose the tiers of each unit. `wanted` maps each kind to a tier or "auto".

    Everything goes to the device if it fits. Otherwise the memory that is left after the largest working set (of a
    unit, or of the units that are used `together`) is handed out kind by kind, the most often moved bytes first, then
    host memory (with an accelerator), then disk. Raises `BudgetError` with unit, numbers and remedy where the budgets
    cannot hold the model.
    """
    if not units:
        return ()
    total = sum(unit.most(kind) for unit in units for kind in KINDS)
    all_auto_or_device = all(tier in ("auto", "device") for tier in wanted.values())
    room = budgets.computing[1] if budgets.device is not None or budgets.offloads else budgets.host
    if all_auto_or_device and total + 2 * max(unit.shared for unit in units) <= room:
        why = f"everything ({format_bytes(total)}) fits the budget"
        return tuple(UnitTiers("device", "device", "device", why) for _ in units)
    in_memory = budgets.disk is None is budgets.device and not any(unit.in_place for unit in units)
    if in_memory and all_auto_or_device:
        raise _shortage_of_memory(units, budgets, total)
    stay = wanted["params"] == "device" or (wanted["params"] == "auto" and in_memory)
    together = NONE_TOGETHER if stay else together  # else they are gathered, and rest nowhere else in that memory
    check_largest_unit(units, budgets, together)
    to_disk = wanted["grads"] == "disk" or (wanted["grads"] == "auto" and budgets.disk is not None)
    tiers = _hand_out(units, budgets, wanted, together, to_disk)
    error = _shortage_of_host(units, budgets, tiers)
    if error is not None and wanted["grads"] == "auto":  # then all rest in memory or none do
        tiers = _hand_out(units, budgets, wanted, together, to_disk=False)
        if not with_gradients_to_disk(units, tiers):
            return tiers
    if error is not None:
        raise error
    return tiers


def _hand_out(
    units: Sequence[UnitBytes], budgets: Budgets, wanted: dict[str, str], together: UsedTogether, to_disk: bool
) -> tuple[UnitTiers, ...]:
    """`to_disk`: whether the host keeps room for gradients on their way to disk."""
    left = _room_at_rest(units, budgets, wanted, together, to_disk)
    chosen: list[dict[str, str]] = [{} for _ in units]
    mostly_frozen = 2 * sum(unit.params for unit in units if not unit.trained) > sum(unit.params for unit in units)
    for trained_first in (True, False) if mostly_frozen else (None,):
        for kind in sorted(KINDS, key=lambda kind: wanted[kind] == "auto"):
            for unit, tiers in _spread(units, chosen) if trained_first is False else zip(units, chosen, strict=True):
                if trained_first in (None, unit.trained):
                    in_tiles = bool(unit.tiles) and kind != "states"
                    tier = _take(left, unit, kind, wanted[kind], budgets.device is None, in_tiles)
                    if tier is None:
                        waiting = sum(
                            each.most(kind) for each, has in zip(units, chosen, strict=True) if kind not in has
                        )
                        raise _shortage(units, unit, kind, wanted[kind], budgets, waiting, left)
                    tiers[kind] = tier
    for kind in ("grads", "states"):
        # A frozen unit has none yet. Unless it lies on the device, they will go where those of the others had to go.
        lowest = max((tiers[kind] for tiers in chosen), key=("device", "host", "disk").index)
        for unit, tiers in zip(units, chosen, strict=True):
            if wanted[kind] == "auto" and not getattr(unit, kind) and unit.params and tiers["params"] != "device":
                tiers[kind] = lowest
    return tuple(UnitTiers(**tiers, why=_why(tiers, wanted)) for tiers in chosen)


def with_gradients_to_disk(units: Sequence[UnitBytes], tiers: Sequence[UnitTiers]) -> list[UnitBytes]:
    return [unit for unit, each in zip(units, tiers, strict=True) if unit.grads and each.grads == "disk"]


def _spread(units: Sequence[UnitBytes], chosen: Sequence[dict[str, str]]) -> list[tuple[UnitBytes, dict[str, str]]]:
    """Any first part of it lies evenly over the order of use. Frozen units are only read: so the drive is busy all the
    time, where it would idle while a run of units computes that are all in memory."""
    pairs = enumerate(zip(units, chosen, strict=True))
    return [pair for _, pair in sorted(pairs, key=lambda each: each[0] * GOLDEN % 1)]


def _room_at_rest(
    units: Sequence[UnitBytes],
    budgets: Budgets,
    wanted: dict[str, str],
    together: UsedTogether,
    to_disk: bool,
) -> dict[str, int]:
    """The bytes of each tier that can be handed out, beside what is at work. With computation on the CPU, device and
    host are one memory under one budget: "device"."""
    left = {"device": max(budgets.computing[1] - most_at_work(units, together), 0), "disk": budgets.disk or 0}
    if budgets.device is not None:
        moving = budgets.moving_bytes(units, wanted["grads"] != "device", units if to_disk else ())
        left["host"] = max(budgets.host - moving, 0)
    return left


def _shortage_of_memory(units: Sequence[UnitBytes], budgets: Budgets, total: int) -> BudgetError:
    """The error where there is one memory, and no disk."""
    least = total + 2 * max(unit.shared for unit in units)
    largest = max(units, key=lambda unit: unit.total)
    return BudgetError(
        f"parameters, gradients and optimizer state of {format_bytes(least)} ({format_bytes(largest.total)} in unit "
        f"{largest.name!r}) do not fit host_memory={format_bytes(budgets.host)} and no disk is given; pass "
        f"disk='/path' or raise host_memory to at least {format_at_least(least)}",
        "host_memory",
        least,
        budgets.host,
    )


def _shortage_of_host(units: Sequence[UnitBytes], budgets: Budgets, tiers: Sequence[UnitTiers]) -> BudgetError | None:
    """The error where the host of an accelerator has no room for gradients on their way to disk."""
    to_disk = with_gradients_to_disk(units, tiers)
    moving = budgets.moving_bytes(units, True, to_disk)
    if budgets.device is None or not to_disk or moving <= budgets.host:
        return None
    least = moving
    while (needed := replace(budgets, host=least).moving_bytes(units, True, units)) > least:
        least = needed  # its parts grow by at most a quarter of it
    largest = max(to_disk, key=lambda unit: unit.leaving)
    return BudgetError(
        f"gradients on their way to disk take {format_bytes(moving)} of host memory with staging, the largest those of "
        f"unit {largest.name!r}, but host_memory is {format_bytes(budgets.host)}; raise host_memory to at least "
        f"{format_at_least(least)}{SMALLER}",
        "host_memory",
        least,
        budgets.host,
    )


def _take(left: dict[str, int], unit: UnitBytes, kind: str, wanted: str, on_cpu: bool, in_tiles: bool) -> str | None:
    """Take the bytes of one kind of the tier that is wanted, or of the first that has them; None where there is none.
    What is used `in_tiles` never rests where it is computed with."""
    memory_tier = "host" if in_tiles else "device"
    automatic = (memory_tier, "disk") if on_cpu or in_tiles else ("device", "host", "disk")
    for tier in automatic if wanted == "auto" else (wanted,):
        memory = "device" if on_cpu and tier == "host" else tier
        nbytes = unit.most(kind)
        if (kind, tier) == ("params", "disk"):
            nbytes = 0 if unit.in_place else nbytes - unit.swapped
        if nbytes <= left[memory]:
            left[memory] -= nbytes
            return tier
    return None


def _why(tiers: dict[str, str], wanted: dict[str, str]) -> str:
    asked = [kind for kind in KINDS if wanted[kind] != "auto"]
    if len(asked) == len(KINDS):
        return "as asked"
    lowest = "disk" if "disk" in tiers.values() else "host" if "host" in tiers.values() else "device"
    reason = {"device": "fits in memory", "host": "device memory is full", "disk": "memory is full"}[lowest]
    return f"{reason}; {', '.join(asked)} as asked" if asked else reason


def _shortage(
    units: Sequence[UnitBytes],
    unit: UnitBytes,
    kind: str,
    wanted: str,
    budgets: Budgets,
    waiting: int,
    left: Mapping[str, int],
) -> BudgetError:
    """`waiting`: bytes of this kind that have no place yet. `left`: those of each tier."""
    memory = "device" if budgets.device is None else "host"
    total = sum(each.most(kind) for each in units)
    needs = f"unit {unit.name!r}: {kind} of {format_bytes(unit.most(kind))} ({format_bytes(total)} in all units)"
    if kind == "grads" and any(each.sums for each in units):
        needs += " as sums of several in fp32"
    host = format_bytes(budgets.host)
    if wanted in ("device", "host"):
        field = "device_memory" if wanted == "device" and budgets.device is not None else "host_memory"
        given = format_bytes(budgets.device or 0) if field == "device_memory" else host
        remedy = f"raise {field} or let {kind} be 'auto'"
        if kind == "params" and wanted == "device":
            remedy += " with stage=3 (stages 1 and 2 keep whole parameters on the device of each rank)"
        here = "device" if field == "device_memory" else memory
        return BudgetError(
            f"{needs} do not fit {field}={given} beside the working set; {remedy}", field, waiting, left[here]
        )
    if budgets.disk is None:
        return BudgetError(
            f"{needs} do not fit host_memory={host} and no disk is given; pass disk='/path' or raise host_memory",
            "host_memory",
            waiting,
            left[memory],
        )
    disk = format_bytes(budgets.disk)
    return BudgetError(
        f"{needs} do not fit the disk: {disk} may be used there; free some, or raise disk_space",
        "disk_space",
        waiting,
        left["disk"],
    )


def with_free_staging(
    units: Sequence[UnitBytes],
    budgets: Budgets,
    wanted: dict[str, str],
    tiers: tuple[UnitTiers, ...],
    together: UsedTogether = NONE_TOGETHER,
) -> Budgets:
    """The budgets with as much staging as leaves every tier as it is: a drive needs more bytes on their way than an
    eighth of a small budget."""
    if not units:
        return budgets
    more = budgets.with_staging_for(most_at_once(units, together)[0])
    try:
        return more if place(units, more, wanted, together) == tiers else budgets
    except BudgetError:
        return budgets
