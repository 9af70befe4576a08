"""Writes random vectors of this client's machine, for the players of the others: where two machines
differ, one of them has left the specification, or it decides nothing there.

    PYTHONPATH=src python tests/random_vectors.py SEED COUNT > ../spec/vectors/random.json
"""

import copy
import json
import sys
from random import Random
from typing import Any

from test_lease_state import decided, field

from pg_fence.lease_state import NEVER, Call, LeadState, LeaseStates

STEPS = 80
TTLS = [300, 1_000, 3_000, 30_000]
OPENING = ["connect", "misconfigured", "28P01", "57P03", "42501", "53300", "panicked"]
STATEMENT = ["ended", "unsent", "unreadable", "panicked", "25006", "53300", "08006", "57P01"]
STATEMENT += ["40001", "55P03", "42501", "22P02", "57014", "PF004"]
ERRORS = ["", "LeaseLost", "LeaseTaken", "TransactionLost", "NoAnswer", "NoConnection", "Refused"]
CODES = [
    "",
    "ended",
    "connect",
    "misconfigured",
    "no transaction",
    "08006",
    "25P02",
    "25P03",
    "28P01",
]
CODES += ["57P01", "53200", "53300", "40001", "55P03", "55000", "42501", "42883", "3F000", "22004"]
CODES += ["23505", "PF001", "PF004"]
STAGES = ["open", "begin", "work", "check", "release", "commit"]
FIELDS = ("call", "do", "connection", "open", "for", "names", "tokens", "wait", "limit", "holder")
FIELDS += ("reclaim", "table")
#: What an effect says by an empty field, so that another client must not fill it.
EMPTY: dict[str, dict[str, Any]] = {
    "call": {"open": False, "reclaim": False, "wait": 0},
    "reply": {"error": "", "in_doubt": False, "sqlstate": "", "reason": "", "advice": ""},
    "event": {"remaining": 0, "reason": "", "advice": ""},
    "log": {"key": "", "code": "", "reason": "", "count": 0},
    **{kind: {} for kind in ("cut", "hang_up", "closed", "lead")},
}


class World:
    """A machine, and what a program and its server may do with it next."""

    def __init__(self, random: Random):
        self.random, self.now = random, 0
        self.jitter = random.choice([0, 0, 500, 1_000])
        self.states, self.leader = LeaseStates(self.jitter), LeadState(0, self.jitter)
        #: What the leader does: "", "acquires", "leads" or "ended".
        self.lead_does = ""
        self.asked: list[str] = []
        #: The leases that were acquired, and how far the last transactions and rows' writes are.
        self.acquired: list[str] = []
        self.last_transactions: set[str] = set()
        self.row_locks: set[str] = set()

    def step(self) -> dict[str, Any]:
        waits = self.random.choice([0, 0, 1, 5, 10, 50, 100, 300, 1_000, 12_000])
        self.now += self.random.randint(waits // 2, waits)
        wake = self.states.wake(self.now)
        if wake < NEVER and self.random.random() < 0.35:
            self.now = max(self.now, wake)
        what, given = self.input()
        effects = decided(self.states, self.leader, self.now, what, copy.deepcopy(given))
        for effect in effects:
            if effect.get("event") == "acquired":
                self.acquired.append(effect["key"])
            if effect.get("lead") == "end":
                self.lead_does = "ended"
        leases = self.states.leases
        living = {key: lease for key, lease in leases.items() if lease.is_held}
        step = {
            "at": self.now,
            "in": {what: given},
            "out": [written(effect) for effect in effects],
            "wake": min(self.states.wake(self.now), 1 << 53),
        }
        beliefs = {
            "held": {key: lease.remaining(self.now) > 0 for key, lease in leases.items()},
            "deadline": {key: lease.deadline for key, lease in living.items()},
            "next_beat": {key: lease.beat_at for key, lease in living.items()},
        }
        return step | {what: by_key for what, by_key in beliefs.items() if by_key}

    def input(self) -> tuple[str, dict[str, Any]]:
        calls = list(self.states.calls.values())
        choices = [self.ask, self.ask, self.ask_for_a_row, self.guard_failed]
        if self.lead_does != "ended":
            choices += [self.lead]
        if calls:
            choices += [self.end_a_call] * 6
        if self.asked:
            choices += [self.give_up]
        if self.acquired:
            choices += [self.use] * 3
        if self.states.owners:
            choices += [self.disconnect]
        rare = self.random.random()
        if rare < 0.02:
            return ("close" if rare < 0.01 else "heartbeat_died" if rare < 0.013 else "tick"), {}
        return self.random.choice(choices)()

    def chance(self, of: float) -> bool:
        return self.random.random() < of

    def ask(self) -> tuple[str, dict[str, Any]]:
        names = self.random.choice([["a"], ["b"], ["a", "b"], ["c", "d", "e"]])
        given = self.new() | {"names": names, "holder": "w"}
        if self.chance(0.4):
            given["wait"] = self.random.choice([100, 3_000, 60_000])
        if self.chance(0.2):
            given["session"] = True
        if len(names) == 1 and self.chance(0.4):
            more = [{"shared": True}, {"named": True}, {"named": True, "reclaim": True}]
            given |= self.random.choice(more)
        return "acquire", given

    def ask_for_a_row(self) -> tuple[str, dict[str, Any]]:
        table, key = self.random.choice(["runs", "jobs"]), str(self.random.randrange(9))
        return "keep_row", self.new() | {"table": table, "key": key, "token": 5}

    def new(self) -> dict[str, Any]:
        self.asked.append(f"r{len(self.asked) + 1}")
        given = {"id": self.asked[-1], "ttl": self.random.choice(TTLS)}
        if self.chance(0.15):
            given["at_most"] = self.random.choice([500, 5_000])
        return given

    def lead(self) -> tuple[str, dict[str, Any]]:
        after = {
            "": ["start"],
            "acquires": ["granted", "failed"],
            "leads": ["failed"],
        }
        what, has_led = self.random.choice(after[self.lead_does]), self.lead_does == "leads"
        self.lead_does = "leads" if what == "granted" else "acquires"
        given: dict[str, Any] = {"what": what}
        if what == "start":
            given["ttl"] = self.random.choice(TTLS)
        if what == "failed":
            given |= {"error": self.random.choice(ERRORS), "code": self.random.choice(CODES)}
            given |= {"lost": has_led and self.chance(0.5)}
            given |= {"stopped": self.chance(0.05), "closed": self.chance(0.05)}
        return "lead", given

    def guard_failed(self) -> tuple[str, dict[str, Any]]:
        given = {
            "stage": self.random.choice(STAGES),
            "code": self.random.choice(CODES),
            "is_fatal": self.chance(0.2),
            "session": self.random.choice(["open", "closed", "unknown"]),
            "of": self.random.choice(["names", "rows", "adopted"]),
            "is_inner": self.chance(0.3),
            "is_lost": self.chance(0.3),
        }
        return "guard_failed", given

    def give_up(self) -> tuple[str, dict[str, Any]]:
        return "give_up", {"id": self.random.choice(self.asked)}

    def disconnect(self) -> tuple[str, dict[str, Any]]:
        return "disconnected", {"connection": self.random.choice(list(self.states.owners))}

    def use(self) -> tuple[str, dict[str, Any]]:
        key = self.random.choice(self.acquired)
        lease = self.states.leases.get(key)
        if key in self.last_transactions:
            self.last_transactions.remove(key)
            stage = self.random.choice(["committed", "rolled back", "in doubt", "inner"])
            return "last_transaction", {"keys": [key], "stage": stage}
        if key in self.row_locks:
            self.row_locks.remove(key)
            return "row_unlocked", {"key": key}
        if lease and lease.is_held and self.chance(0.5):
            if lease.table and self.chance(0.5):
                self.row_locks.add(key)
                return "row_locked", {"key": key}
            self.last_transactions.add(key)
            return "last_transaction", {"keys": [key], "stage": "begins"}
        # What a lease says after its end is not the machine's.
        what = self.random.choice(["release", "suspect", *(["check"] if lease else [])])
        return what, {"keys": [key]} if what == "suspect" else {"key": key}

    def end_a_call(self) -> tuple[str, dict[str, Any]]:
        call = self.random.choice(list(self.states.calls.values()))
        of = {"call": call.number}
        if call.open and self.chance(0.75):
            return "sent", of
        if call.open or self.chance(0.22):
            code = self.random.choice(OPENING if call.open else STATEMENT)
            return "failed", of | {"code": code, "broken": self.chance(0.2)}
        return "answer", of | self.answer(call)

    def answer(self, call: Call) -> dict[str, Any]:
        if call.do == "acquire" and self.chance(0.4):
            holder = self.random.choice(["w", "x", ""])
            state = self.random.choice(["held", "uncommitted"])
            remaining = self.random.choice([0, 700, 9_000])
            return {"taken": {"holder": holder, "remaining": remaining, "state": state}}
        if call.do == "acquire":
            return {"rows": [[call.names, self.random.randrange(1, 99)]]}
        if call.do == "undo":
            return {"rows": [self.random.choice([0, 1])]}
        if call.do == "release":
            return {"rows": [self.random.choice([5, 5, 5, None]) for _ in call.names]}
        return {"rows": [self.outcome() for _ in call.names]}

    def outcome(self) -> list[Any]:
        ttl = self.random.choice(TTLS)
        kept, later = ["kept", ttl, ttl // 3, None], ["later", 1_000, ttl // 10, "55P03"]
        rare = [["lost", None, None, None], ["refused", None, None, "42501"]]
        rare += [later, ["later", 1_000, 0, "53200"], ["later", None, None, "P0001"]]
        rare += [["refused", None, None, "22023"]]
        return kept if self.chance(0.75) else self.random.choice(rare)


def written(effect: dict[str, Any]) -> dict[str, Any]:
    """An effect as a vector has it."""
    if "again" in effect:
        return effect
    names = FIELDS if "call" in effect else effect
    fields = {name: field(effect, name) for name in names}
    kind = next(name for name in EMPTY if name in effect)
    return EMPTY[kind] | {name: value for name, value in fields.items() if value}


def vector(seed: str) -> dict[str, Any]:
    world = World(Random(seed))
    steps = [world.step() for _ in range(STEPS)]
    return {"name": seed, "jitter": world.jitter, "steps": steps}


if __name__ == "__main__":
    (_, seed, count) = sys.argv
    vectors = [vector(f"{seed}/{n}") for n in range(int(count))]
    # A step is a line.
    text = json.dumps(vectors, separators=(",", ":"))
    print(text.replace('{"at"', '\n{"at"').replace(',{"name"', ',\n{"name"'))
