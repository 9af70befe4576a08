//! Connections whose every transaction presents a token.

use tokio_postgres::Config;

/// What a connection is opened with (`options` of libpq and of most drivers, `PGOPTIONS`), so that all it writes presents
/// that token.
pub fn options(token: i64) -> String {
    format!("-c pg_fence.token={token}")
}

pub(crate) fn presenting(token: i64, config: &Config) -> Config {
    let mut config = config.clone();
    let more = options(token);
    let all = config.get_options().map_or_else(|| more.clone(), |own| format!("{own} {more}"));
    config.options(all);
    config
}
