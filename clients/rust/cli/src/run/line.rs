//! The holder of the lease that is waited for, for people; and our place in line.

use super::messages::Told;
use crate::connection::Server;
use crate::failure::{Failure, Result};
use pg_fence_client::Connected;
use std::time::Duration;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

/// The holder that keeps us waiting: of several names, and several grants, the one that lasts longest. And our place:
/// how many stand in line for the same lock before us, and we. (Its tag is that of docs/internals/locking.md. For
/// several names at once there is no line.)
pub async fn who_has(connected: &Connected, names: &[String], own: &str) -> Result<Option<Told>> {
    // The first in line has the lock, and asks for it once more to sleep on it.
    let sql = "WITH own AS (
            SELECT locktype, database, classid, objid, objsubid, pid,
                   bool_or(granted) AS is_first, min(waitstart) AS since
            FROM pg_stat_activity AS a JOIN pg_locks AS l USING (pid)
            WHERE a.application_name = $2 AND a.usename = current_user AND a.datname = current_database()
              AND l.locktype = 'advisory' AND l.objsubid = 20552
            GROUP BY locktype, l.database, classid, objid, objsubid, pid
        ), place AS (
            SELECT nullif(count(DISTINCT l.pid), 0) AS place FROM own JOIN pg_locks AS l
                USING (locktype, database, classid, objid, objsubid)
            WHERE l.pid = own.pid OR NOT own.is_first AND (l.granted OR l.waitstart < own.since)
        )
        SELECT holder, (extract(epoch FROM remaining) * 1000)::bigint, place FROM fence.leases, place
        WHERE name = ANY ($1) AND state IN ('held', 'uncommitted') ORDER BY remaining DESC LIMIT 1";
    let names = names.to_vec();
    let arguments: [(&(dyn ToSql + Sync), Type); 2] =
        [(&names, Type::TEXT_ARRAY), (&own, Type::TEXT)];
    let rows = connected.query_typed(sql, &arguments).await;
    let rows = rows.map_err(Failure::of_driver)?;
    let told = |row: &Row| {
        let (holder, remaining): (Option<String>, i64) =
            (row.try_get(0).ok()?, row.try_get(1).ok()?);
        Some(Told::Waiting {
            holder: holder.unwrap_or_default(),
            remaining_ms: remaining.try_into().unwrap_or(0),
            place: row.try_get(2).ok()?,
        })
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
