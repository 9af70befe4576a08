//! Which tokens are a grant's, that they only grow and are durable; how a session presents one.

automod::dir!(pub "tests/lab/tokens");
