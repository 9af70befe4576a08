"""Plays clients/spec/vectors, as every client does: without a server, in a second. Their format is
in clients/spec/README.md."""

import json
import os
import unittest
from pathlib import Path
from typing import Any

from pg_fence.lease_state import LeadState, LeaseState, LeaseStates, guard_failed

VECTORS = Path(os.environ.get("VECTORS") or Path(__file__).parents[2] / "spec" / "vectors")


class Vectors(unittest.TestCase):
    def test_vectors(self) -> None:
        played = 0
        for file in sorted(VECTORS.glob("*.json")):
            for vector in json.loads(file.read_text()):
                with self.subTest(f"{file.stem}: {vector['name']}"):
                    self.play(vector)
                played += 1
        self.assertGreater(played, 200)

    def play(self, vector: dict[str, Any]) -> None:
        jitter = vector.get("jitter", 0)
        states, leader = LeaseStates(jitter), LeadState(0, jitter)
        for n, step in enumerate(vector["steps"]):
            now, where = step["at"], f"step {n} at {step['at']}"
            ((what, given),) = step["in"].items()
            given = {key: written_out(value) for key, value in given.items()}
            self.assertLessEqual(given.get("call", 0), states.last_call, f"{where}: never sent")
            effects = decided(states, leader, now, what, given)
            self.assertEqual(len(effects), len(step["out"]), f"{where}: {effects}")
            for effect, expected in zip(effects, step["out"], strict=True):
                for key, value in expected.items():
                    self.assert_like(field(effect, key), value, f"{where}: {key} of {effect}")
            for key, is_held in step.get("held", {}).items():
                lease = states.leases.get(key)
                self.assertEqual(lease is not None and lease.remaining(now) > 0, is_held, where)
            for what in ("deadline", "next_beat"):
                for key, at in step.get(what, {}).items():
                    is_at = getattr(states.leases[key], what.replace("next_beat", "beat_at"))
                    self.assertEqual(is_at, at, f"{where}: the {what} of {key}")
            if "wake" in step:
                self.assertEqual(min(states.wake(now), 1 << 53), step["wake"], f"{where}: wake")

    def assert_like(self, value: Any, expected: Any, where: str) -> None:
        if isinstance(expected, dict):
            self.assertEqual(len(value), expected["length"], where)
        elif isinstance(expected, list):
            self.assertEqual(list(value or ()), written_out(expected), where)
        else:
            self.assertEqual(value or 0, expected or 0, where)


def written_out(value: Any) -> Any:
    """Without the shorthands."""
    if not isinstance(value, list):
        return value
    everything: list[Any] = []
    for one in value:
        if isinstance(one, dict) and "prefix" in one:
            everything += [f"{one['prefix']}{n}" for n in range(one["count"])]
        elif isinstance(one, dict) and "each" in one:
            everything += [one["each"]] * one["count"]
        else:
            everything.append(written_out(one))
    return everything


def field(effect: dict[str, Any], key: str) -> Any:
    call = effect.get("call")
    if call is None or key == "open":
        return effect.get(key)
    if key == "for":
        return call.sender.id if isinstance(call.sender, LeaseState) else None
    return call.number if key == "call" else getattr(call, key)


def decided(
    states: LeaseStates, leader: LeadState, now: int, what: str, given: dict[str, Any]
) -> list[Any]:
    match what:
        case "nothing":
            return []
        case "lead":
            return led(leader, now, **given)
        case "guard_failed":
            return [guard_failed(**given)]
        case "tick":
            return states.step(now, lambda: None)
        case "acquire" | "keep_row":
            if what == "keep_row":
                given = {"names": [given.pop("key")], "named": True} | given
            lease = LeaseState(**given | {"names": tuple(given["names"])})
            return states.step(now, lambda: states.acquire(lease))
        case "check":
            return states.step(now, lambda: states.effects.append(checked(states, now, **given)))
        case "answer":
            number, rows = given["call"], given.get("rows", [])
            if (call := states.calls.get(number)) and call.do.startswith("keep"):
                rows = [(row + [None] * 3)[:4] for row in rows]
            taken = given.get("taken")
            return states.step(now, lambda: states.answered(number, rows, taken), number)
        case "failed" | "sent":
            number = given.pop("call")
            return states.step(now, lambda: getattr(states, what)(number, **given), number)
        case _:
            return states.step(now, lambda: getattr(states, what)(**given))


def checked(states: LeaseStates, now: int, key: str) -> dict[str, Any]:
    lease = states.leases.get(key)
    reason = lease.end_reason(now) if lease else "released"
    advice = lease and lease.advice
    return {"reply": key, "error": reason and "LeaseLost", "reason": reason, "advice": advice}


def led(
    leader: LeadState,
    now: int,
    what: str,
    ttl: int = 0,
    error: str = "",
    code: str = "",
    lost: bool = False,
    stopped: bool = False,
    closed: bool = False,
) -> list[Any]:
    match what:
        case "start":
            leader.ttl = ttl
        case "granted":
            leader.granted(now)
        case "failed":
            return leader.failed(now, error, code, lost, stopped, closed)
    return []


if __name__ == "__main__":
    unittest.main()
