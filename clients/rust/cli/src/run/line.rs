//! The holder of the lease that is waited for, for people.

use super::messages::Told;
use crate::connection::Server;
use crate::failure::{Failure, Result};
use pg_fence_client::Connected;
use std::time::Duration;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

/// The holder that keeps us waiting: of several names, and several grants, the one that lasts longest.
pub async fn who_has(connected: &Connected, names: &[String]) -> Result<Option<Told>> {
    let sql = "SELECT holder, (extract(epoch FROM remaining) * 1000)::bigint FROM fence.leases
        WHERE name = ANY ($1) AND state IN ('held', 'uncommitted') ORDER BY remaining DESC LIMIT 1";
    let rows = connected.query_typed(sql, &[(&names, Type::TEXT_ARRAY)]).await;
    let rows = rows.map_err(Failure::of_driver)?;
    let told = |row: &Row| {
        let holder: Option<String> = row.try_get(0).ok()?;
        let remaining_ms = row.try_get::<_, i64>(1).ok()?.try_into().unwrap_or(0);
        Some(Told::Waiting { holder: holder.unwrap_or_default(), remaining_ms })
    };
    Ok(rows.first().and_then(told))
}

/// The open transaction that keeps a lease which nobody holds, where that can be seen.
pub async fn kept_by(server: &Server, names: &[String], limit: Duration) -> Option<String> {
    let sql = "SELECT array_to_string(blocking_pids, ', '), state, coalesce(holder, '')
                 FROM fence.leases WHERE name = ANY ($1) AND blocking_pids <> '{}' LIMIT 1";
    let names = names.to_vec();
    let asked = async {
        let connected = server.connect().await.ok()?;
        let rows = connected.query_typed(sql, &[(&names, Type::TEXT_ARRAY)]).await.ok()?;
        let text = |at| rows.first()?.try_get::<_, String>(at).ok();
        let (pids, state, holder) = (text(0)?, text(1)?, text(2)?);
        Some(format!("kept from all by an open transaction (pid {pids}; {state}, {holder})"))
    };
    tokio::time::timeout(limit, asked).await.ok()?
}
