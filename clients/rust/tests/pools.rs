//! Connections that are others' afterwards, which a guard gives back as they were. A file of its own: an epoch silences the
//! tokens of all tests that run beside it.

#![cfg(feature = "sqlx")]

use pg_fence_client::{Connected, Error, Fence, Lease, connect};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Executor, PgConnection};
use std::time::Duration;
use tokio_postgres::NoTls;

const LONG: Duration = Duration::from_secs(300);

struct Place {
    url: String,
    admin: Connected,
    fence: Fence,
}

impl Place {
    async fn new() -> Place {
        let url = std::env::var("DATABASE_URL").expect("DATABASE_URL is set");
        let admin = connect(&url, NoTls).await.unwrap();
        Place { fence: Fence::new(&url).unwrap(), admin, url }
    }

    async fn lease(&self, name: &str) -> Lease {
        self.admin.execute("SELECT lease_revoke($1)", &[&name]).await.unwrap();
        self.fence.lease(name).ttl(LONG).acquire().await.unwrap()
    }
}

async fn process(connection: &mut PgConnection) -> i32 {
    sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(connection).await.unwrap()
}

#[tokio::test]
async fn a_pool_of_one_connection_gets_it_back() {
    let place = Place::new().await;
    let pool = PgPoolOptions::new().max_connections(1).connect(&place.url).await.unwrap();
    let lease = place.lease("pooled").await;
    for work in
        ["SELECT 1", "SELECT 1 / 0", "COMMIT", "SELECT pg_terminate_backend(pg_backend_pid())"]
    {
        let mut connection = pool.acquire().await.unwrap();
        let mut guard = lease.guard(&mut *connection).await.unwrap();
        let _ = guard.execute(work).await;
        assert_eq!(guard.commit().await.is_ok(), work == "SELECT 1", "{work}");
    }
    // No token speaks until its holder has renewed.
    place.admin.batch_execute("SELECT fence_new_epoch()").await.unwrap();
    let mut connection = pool.acquire().await.unwrap();
    let before = process(&mut connection).await;
    let mut guard = lease.guard(&mut *connection).await.unwrap();
    assert_eq!(process(&mut guard).await, before);
    assert_eq!((pool.size(), pool.num_idle()), (1, 0));
    guard.commit().await.unwrap();
    drop(connection);
    assert_eq!(process(&mut pool.acquire().await.unwrap()).await, before);
}

/// On a driver's own connection, which a loss does not break off.
#[tokio::test]
async fn what_a_loss_has_ended_hangs_no_more() {
    let place = Place::new().await;
    let revoked = async |lease: &Lease| {
        tokio::time::sleep(Duration::from_millis(300)).await;
        place.admin.execute("SELECT lease_revoke($1)", &[&lease.names()[0]]).await.unwrap();
        lease.check()
    };
    let (mut client, connection) = tokio_postgres::connect(&place.url, NoTls).await.unwrap();
    tokio::spawn(connection);
    let lease = place.fence.lease("hangs").ttl(Duration::from_secs(1)).acquire().await.unwrap();
    let guard = lease.guard(&mut client).await.unwrap();
    let (hung, _) = tokio::join!(guard.batch_execute("SELECT pg_sleep(300)"), revoked(&lease));
    assert!(matches!(hung, Err(Error::LeaseLost { .. })), "{hung:?}");
    drop(guard);
    client.batch_execute("SELECT 1").await.unwrap();
    let pool = PgPoolOptions::new().max_connections(1).connect(&place.url).await.unwrap();
    let lease = place.fence.lease("hangs").ttl(Duration::from_secs(1)).acquire().await.unwrap();
    let mut connection = pool.acquire().await.unwrap();
    let mut guard = lease.guard(&mut *connection).await.unwrap();
    let (hung, _) = tokio::join!(lease.run(guard.execute("SELECT pg_sleep(300)")), revoked(&lease));
    assert!(matches!(hung, Err(Error::LeaseLost { .. })), "{hung:?}");
    drop(guard);
    drop(connection);
    process(&mut pool.acquire().await.unwrap()).await;
    // And what the caller has given up.
    let lease = place.lease("given up").await;
    let guard = lease.guard(&mut client).await.unwrap();
    let sleep = guard.batch_execute("SELECT pg_sleep(300)");
    assert!(tokio::time::timeout(Duration::from_millis(300), sleep).await.is_err());
    drop(guard);
    client.batch_execute("SELECT 1").await.unwrap();
    place.fence.close().await;
}
