//! Guarded transactions: what they lock, and which snapshots they accept.

automod::dir!(pub "tests/suite/guards");
