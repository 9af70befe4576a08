//! A lease that somebody else grants: etcd, ZooKeeper, another database. Their token is made known here, and there is no
//! deadline: the service that grants it tells its end, by ending this command, or by a greater token.

use crate::failure::{Failure, Result, status};
use pg_fence_client::{AdoptRequest, Error};
use std::time::Duration;

/// Makes the token known, or finds that it still is; a failover is mended by it. False where transactions of the one
/// before go on for longer than `wait`. Each call is bounded by `limit` beyond that.
pub async fn adopt(request: AdoptRequest, wait: Duration, limit: Duration) -> Result<bool> {
    let adopting = request.wait(wait).try_acquire();
    match tokio::time::timeout(wait.saturating_add(limit), adopting).await {
        Ok(Ok(adopted)) => Ok(adopted.is_some()),
        Ok(Err(Error::StaleToken(stale))) => Err(Failure::new(status::LOST, stale.message())),
        Ok(Err(error)) => Err(Failure::of_client(&error)),
        Err(_) => Err(Failure::new(status::UNAVAILABLE, "the server did not answer in time")),
    }
}
