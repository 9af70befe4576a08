//! Which tokens belong to a grant, that they only grow and are durable, and how a session presents one.

automod::dir!(pub "tests/suite/tokens");
