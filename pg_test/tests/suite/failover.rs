//! Starts, crashes, promotions, restores and upgrades of a server: no token is handed out twice.

automod::dir!(pub "tests/suite/failover");
