//! What the scenarios of all clients do not show: what is Rust's own.
//!
//! `DATABASE_URL=postgresql://… cargo test`. The database has the extension and is otherwise of no use: each test
//! makes a table in it.

use pg_fence_client::{
    Adopted, Connected, Error, Fence, Guarded, Lease, Reason, classify, connect,
};
use serde_json::json;
use std::fmt;
use std::future::{Future, pending, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Handle};
use tokio_postgres::types::{FromSqlOwned, ToSql};
use tokio_postgres::{Client, NoTls};

mod many;
mod slips;
#[cfg(feature = "sqlx")]
mod sqlx;
#[cfg(feature = "tracing")]
mod telemetry;
mod verbs;

const LONG: Duration = Duration::from_secs(300);
/// Tells what hangs for ever from what does not.
const PATIENCE: Duration = Duration::from_secs(60);

fn url() -> String {
    std::env::var("DATABASE_URL").expect("DATABASE_URL is set")
}

async fn client() -> Connected {
    connect(&url(), NoTls).await.unwrap()
}

/// As most programs have one: its connection is driven by a task that the client knows nothing of.
async fn bare_client() -> Client {
    let (client, connection) = tokio_postgres::connect(&url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// A table of one order, bound to its lease.
struct Shop {
    admin: Connected,
    fence: Fence,
    name: &'static str,
}

impl Shop {
    async fn new(name: &'static str) -> Shop {
        let admin = client().await;
        let sql = format!(
            "DROP TABLE IF EXISTS {name};
             CREATE TABLE {name} (id bigint PRIMARY KEY, status text);
             INSERT INTO {name} VALUES (7, 'new');
             SELECT fence_protect('{name}', lease => '{name}:{{id}}');
             SELECT lease_revoke('{name}:7')"
        );
        admin.batch_execute(&sql).await.unwrap();
        Shop { admin, fence: Fence::new(&url()).unwrap(), name }
    }

    fn order(&self) -> String {
        format!("{}:7", self.name)
    }

    async fn lease(&self) -> Lease {
        self.fence.lease(self.order()).ttl(LONG).acquire().await.unwrap()
    }

    fn set(&self, status: &str) -> String {
        format!("UPDATE {} SET status = '{status}' WHERE id = 7", self.name)
    }

    /// The last write of a transaction, and its commit.
    async fn pay(&self, guarded: Guarded<'_>) -> Result<(), Error> {
        guarded.execute(&self.set("paid"), &[]).await?;
        guarded.commit().await
    }

    async fn value<T: FromSqlOwned>(&self, sql: &str, params: &[&(dyn ToSql + Sync)]) -> T {
        self.admin.query_one(sql, params).await.unwrap().get(0)
    }

    async fn schema(&self) -> String {
        let sql =
            "SELECT extnamespace::regnamespace::text FROM pg_extension WHERE extname = 'pg_fence'";
        self.value(sql, &[]).await
    }

    async fn status(&self) -> String {
        self.value(&format!("SELECT status FROM {} WHERE id = 7", self.name), &[]).await
    }

    async fn revoke(&self) {
        self.admin.execute("SELECT lease_revoke($1)", &[&self.order()]).await.unwrap();
    }

    async fn is_held(&self, name: &str) -> bool {
        self.value("SELECT EXISTS (SELECT FROM lease_info($1) WHERE state = 'held')", &[&name])
            .await
    }

    async fn guards(&self) -> i32 {
        let sql = "SELECT coalesce(max(cardinality(blocking_pids)), 0) FROM lease_info($1)";
        self.value(sql, &[&self.order()]).await
    }
}

async fn wait_until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < PATIENCE, "never: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

fn lost_by(error: &Error) -> Reason {
    match error {
        Error::LeaseLost(lost) => lost.reason(),
        other => panic!("no loss, but {other:?}"),
    }
}

/// An error of the work's own.
#[derive(Debug)]
enum Own {
    Fence(Error),
    OutOfStock,
}

impl From<Error> for Own {
    fn from(error: Error) -> Own {
        Own::Fence(error)
    }
}

// Leases

#[tokio::test]
async fn a_lease_that_is_taken() {
    let shop = Shop::new("taken").await;
    let request = shop.fence.lease(shop.order()).ttl(LONG);
    let lease =
        request.clone().holder("first").metadata(json!({ "run": 7 })).acquire().await.unwrap();
    let sql = "SELECT holder || ' ' || metadata FROM lease_info('taken:7')";
    assert_eq!(shop.value::<String>(sql, &[]).await, r#"first {"run": 7}"#);
    assert!(lease.held() && lease.remaining() > Duration::from_secs(200));
    assert!(request.clone().try_acquire().await.unwrap().is_none());
    assert!(matches!(request.acquire().await, Err(Error::LeaseTaken(_))));
    lease.release().await.unwrap();
    assert!(!shop.is_held("taken:7").await);
}

#[tokio::test]
async fn reclaim_is_for_the_same_holder() {
    let shop = Shop::new("reclaimed").await;
    let request = shop.fence.lease(shop.order()).ttl(LONG);
    let lost = request.clone().holder("me").acquire().await.unwrap();
    let lease = request.reclaim("me").acquire().await.unwrap();
    assert_eq!(lost.renew().await.unwrap_err().reason(), Reason::Gone);
    assert!(lost.release().await.is_err());
    lease.release().await.unwrap();
}

#[tokio::test]
async fn bad_input_is_the_servers_error() {
    let shop = Shop::new("bad_input").await;
    let error = shop.fence.lease("").acquire().await.unwrap_err();
    assert_eq!(error.sqlstate(), Some("22023"), "{error}");
    assert!(classify(&error).is_none());
    assert!(shop.fence.lease(["a", "b"]).shared().acquire().await.is_err());
    assert!(shop.fence.lease(Vec::<String>::new()).acquire().await.is_err());
}

#[tokio::test]
async fn the_work_of_a_lease_is_dropped_on_a_loss() {
    let shop = Shop::new("dropped_work").await;
    let request = shop.fence.lease(shop.order()).ttl(Duration::from_secs(3));
    let held = request.hold(async |_| {
        shop.revoke().await;
        pending::<Result<(), Error>>().await
    });
    assert_eq!(lost_by(&held.await.unwrap_err()), Reason::Gone);
}

#[tokio::test]
async fn an_error_of_the_work_is_not_replaced_and_a_loss_is_not_hidden() {
    let shop = Shop::new("own_errors").await;
    let request = shop.fence.lease(shop.order()).ttl(LONG);
    let failed = request.clone().hold(async |_| {
        shop.revoke().await;
        Err::<(), _>(Own::OutOfStock)
    });
    assert!(matches!(failed.await, Err(Own::OutOfStock)));
    let unaware = request.hold(async |_| {
        shop.revoke().await;
        Ok::<_, Own>(())
    });
    match unaware.await {
        Err(Own::Fence(error)) => assert_eq!(lost_by(&error), Reason::Gone),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_released_lease_refuses() {
    let shop = Shop::new("released").await;
    let lease = shop.lease().await;
    let told = tokio::spawn(lease.lost());
    lease.release().await.unwrap();
    assert!(told.await.unwrap().is_none());
    assert_eq!(lease.check().unwrap_err().reason(), Reason::Released);
    let error = lease.guard(&mut client().await).await.map(drop).unwrap_err();
    assert_eq!(lost_by(&error), Reason::Released);
    lease.release().await.unwrap();
}

#[tokio::test]
async fn a_dropped_lease_is_given_back_in_the_background() {
    let shop = Shop::new("dropped_lease").await;
    let before = tasks();
    let lease = shop.lease().await;
    let also = lease.clone();
    drop(lease);
    assert!(also.renew().await.unwrap().is_some());
    drop(also);
    wait_until("it is given back", async || !shop.is_held("dropped_lease:7").await).await;
    wait_until("its tasks have ended", async || tasks() == before).await;
}

#[tokio::test]
async fn a_wait_that_is_dropped_leaves_nobody_in_line() {
    let shop = Shop::new("dropped_wait").await;
    let lease = shop.lease().await;
    let before = tasks();
    let waits = shop.fence.lease(shop.order()).wait(LONG).acquire();
    assert!(tokio::time::timeout(Duration::from_millis(500), waits).await.is_err());
    wait_until("its tasks have ended", async || tasks() == before).await;
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query ~ 'lease_acquire' \
               AND pid <> pg_backend_pid()";
    wait_until("nobody waits", async || shop.value::<i64>(sql, &[]).await == 0).await;
    lease.release().await.unwrap();
    assert!(!shop.is_held("dropped_wait:7").await);
}

#[tokio::test]
async fn a_grant_that_nobody_waits_for_is_given_back() {
    let shop = Shop::new("dropped_grant").await;
    let before = tasks();
    for micros in [0, 500, 1000, 2000, 4000, 8000, 16000, 32000] {
        let acquires = shop.fence.lease(shop.order()).ttl(LONG).acquire();
        drop(tokio::time::timeout(Duration::from_micros(micros), acquires).await);
    }
    wait_until("its tasks have ended", async || tasks() == before).await;
    assert!(!shop.is_held("dropped_grant:7").await);
}

#[tokio::test]
async fn a_grant_that_comes_while_its_wait_is_given_up_is_given_back() {
    let shop = Shop::new("late_grant").await;
    let before = tasks();
    for round in 0..40 {
        let first = shop.lease().await;
        let mut waits = Box::pin(shop.fence.lease(shop.order()).ttl(LONG).wait(LONG).acquire());
        assert!(tokio::time::timeout(Duration::from_millis(30), waits.as_mut()).await.is_err());
        let releases = tokio::spawn(async move { first.release().await });
        // Before, during and after the hand-over.
        tokio::time::sleep(Duration::from_micros(100 * round)).await;
        drop(waits);
        releases.await.unwrap().unwrap();
        wait_until("its tasks have ended", async || tasks() == before).await;
        assert!(!shop.is_held("late_grant:7").await, "in round {round}");
    }
}

#[tokio::test]
async fn the_longest_ttl_can_be_renewed() {
    let shop = Shop::new("longest_ttl").await;
    let year = Duration::from_secs(366 * 24 * 3600);
    let lease = shop.fence.lease(shop.order()).ttl(year).acquire().await.unwrap();
    assert!(lease.renew().await.unwrap() > Some(lease.token()));
    lease.release().await.unwrap();
}

#[tokio::test]
async fn connections_can_come_from_a_function_and_names_from_a_schema() {
    let shop = Shop::new("opened").await;
    let opener = async || connect(&url(), NoTls).await;
    let fence = Fence::with_opener(opener).in_schema(&shop.schema().await);
    let lease = fence.lease(shop.order()).acquire().await.unwrap();
    let mut client = client().await;
    shop.pay(lease.guard(&mut client).await.unwrap()).await.unwrap();
    lease.release().await.unwrap();
    assert_eq!(shop.status().await, "paid");
}

#[tokio::test]
async fn the_end_of_a_session_is_seen_at_once() {
    let shop = Shop::new("session_end").await;
    let fence = Fence::new(&format!("{}&application_name=session_end", url())).unwrap();
    let lease = fence.lease(shop.order()).ttl(LONG).session().acquire().await.unwrap();
    let loss = tokio::spawn(lease.lost());
    let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'session_end'";
    assert_eq!(shop.value::<i64>(sql, &[]).await, 1);
    let loss = tokio::time::timeout(PATIENCE, loss).await.unwrap().unwrap().unwrap();
    assert_eq!(loss.reason(), Reason::Session);
}

#[tokio::test]
async fn work_that_blocks_its_runtime_keeps_its_lease_on_another() {
    let other = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let shop = Shop::new("blocked").await;
    let fence = shop.fence.clone().on(other.handle().clone());
    let lease = fence.lease(shop.order()).ttl(Duration::from_secs(3)).acquire().await.unwrap();
    // The runtime of a test has this thread only.
    std::thread::sleep(Duration::from_secs(5));
    lease.check().unwrap();
    lease.release().await.unwrap();
    other.shutdown_background();
}

#[tokio::test]
async fn work_that_blocks_its_heartbeat_is_told() {
    let shop = Shop::new("blocking").await;
    let lease = shop.fence.lease(shop.order()).ttl(Duration::from_secs(2)).acquire().await.unwrap();
    std::thread::sleep(Duration::from_secs(3));
    assert!(!lease.held());
    assert_eq!(lease.check().unwrap_err().reason(), Reason::Deadline);
    assert!(lease.release().await.is_err());
}

#[tokio::test]
async fn a_lease_whose_runtime_is_gone_is_lost() {
    let other = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let shop = Shop::new("no_runtime").await;
    let fence = shop.fence.clone().on(other.handle().clone());
    let lease = fence.lease(shop.order()).ttl(LONG).acquire().await.unwrap();
    let loss = tokio::spawn(lease.lost());
    other.shutdown_background();
    let loss = tokio::time::timeout(PATIENCE, loss).await.unwrap().unwrap();
    assert_eq!(loss.unwrap().reason(), Reason::Deadline);
    assert!(tokio::time::timeout(PATIENCE, lease.release()).await.unwrap().is_err());
    assert!(fence.lease(shop.order()).acquire().await.is_err());
}

// Transactions

#[tokio::test]
async fn a_client_and_one_that_can_be_broken_off() {
    let shop = Shop::new("clients").await;
    let lease = shop.lease().await;
    let (mut bare, mut connected) = (bare_client().await, client().await);
    let guarded = lease.guard(&mut bare).await.unwrap();
    assert_eq!(guarded.execute(&shop.set("guarded"), &[]).await.unwrap(), 1);
    guarded.commit().await.unwrap();
    assert_eq!(shop.status().await, "guarded");
    let presented = lease.present(&mut connected).await.unwrap();
    presented.execute(&shop.set("presented"), &[]).await.unwrap();
    presented.commit().await.unwrap();
    assert_eq!(shop.status().await, "presented");
    let undone = lease.guard(&mut connected).await.unwrap();
    undone.execute(&shop.set("undone"), &[]).await.unwrap();
    drop(undone);
    assert_eq!(connected.execute("SELECT 1", &[]).await.unwrap(), 1);
    assert_eq!(shop.status().await, "presented");
    lease.release().await.unwrap();
    connected.close().await;
}

#[tokio::test]
async fn an_open_transaction_is_left_to_the_code_that_began_it() {
    let shop = Shop::new("nested").await;
    let lease = shop.lease().await;
    let mut client = bare_client().await;
    let mut transaction = client.transaction().await.unwrap();
    shop.pay(lease.guard(&mut transaction).await.unwrap()).await.unwrap();
    assert_eq!(shop.status().await, "new");
    assert_eq!(shop.guards().await, 1);
    transaction.commit().await.unwrap();
    assert_eq!(shop.status().await, "paid");
    lease.release().await.unwrap();
}

#[derive(Debug)]
struct Wrapped(tokio_postgres::Error);

impl fmt::Display for Wrapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the pool says")
    }
}

impl std::error::Error for Wrapped {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

#[tokio::test]
async fn an_error_has_its_type_however_deep_it_is_wrapped() {
    let shop = Shop::new("typed").await;
    let other = shop.fence.lease("typed:8").acquire().await.unwrap();
    let mut client = client().await;
    let presented = other.present(&mut client).await.unwrap();
    let error = presented.execute(&shop.set("late"), &[]).await.unwrap_err();
    let Error::NotSpeaking(refusal) = &error else { panic!("{error:?}") };
    assert_eq!(refusal.detail()["lease"], "typed:7");
    assert!(refusal.hint().is_some());
    assert_eq!(error.sqlstate(), Some("PF004"));
    drop(presented);
    let unfenced = client.execute(&shop.set("unfenced"), &[]).await.unwrap_err();
    assert!(matches!(classify(&Wrapped(unfenced)), Some(Error::NoToken(_))));
    let guarded = other.guard(&mut client).await.unwrap();
    let error = guarded.execute("SELECT 1/0", &[]).await.unwrap_err();
    assert_eq!(error.sqlstate(), Some("22012"));
    assert!(matches!(error, Error::Postgres(_)) && classify(&error).is_none());
    drop(guarded);
    other.release().await.unwrap();
}

#[tokio::test]
async fn a_transaction_that_has_failed_is_not_committed_in_silence() {
    let shop = Shop::new("failed").await;
    let lease = shop.lease().await;
    let mut client = client().await;
    let guarded = lease.guard(&mut client).await.unwrap();
    guarded.execute(&shop.set("paid"), &[]).await.unwrap();
    assert!(guarded.execute("SELECT 1/0", &[]).await.is_err());
    // The driver's own commit takes the ROLLBACK for an answer.
    let error = guarded.commit().await.unwrap_err();
    assert_eq!(error.sqlstate(), Some("25P02"));
    assert!(!error.is_in_doubt());
    assert_eq!(shop.status().await, "new");
    // The connection is out of the transaction.
    shop.pay(lease.guard(&mut client).await.unwrap()).await.unwrap();
    lease.release().await.unwrap();
    assert_eq!(shop.status().await, "paid");
}

#[tokio::test]
async fn the_last_write_releases() {
    let shop = Shop::new("last_write").await;
    let lease = shop.lease().await;
    let mut client = client().await;
    // Dropped where it waits: the heartbeat goes on.
    let guarded = lease.guard(&mut client).await.unwrap();
    {
        let mut releases = pin!(guarded.commit_and_release());
        let is_waiting =
            poll_fn(|context| Poll::Ready(releases.as_mut().poll(context).is_pending()));
        assert!(is_waiting.await, "the release has been sent, and no answer can have come");
    }
    assert!(lease.renew().await.unwrap().is_some());
    let guarded = lease.guard(&mut client).await.unwrap();
    guarded.execute(&shop.set("paid"), &[]).await.unwrap();
    guarded.commit_and_release().await.unwrap();
    assert!(!shop.is_held("last_write:7").await);
    assert_eq!(lease.check().unwrap_err().reason(), Reason::Released);
    lease.release().await.unwrap();
    assert_eq!(shop.status().await, "paid");
}

#[tokio::test]
async fn a_broken_session_is_no_loss() {
    let shop = Shop::new("broken").await;
    let lease = shop.lease().await;
    let mut client = client().await;
    let guarded = lease.guard(&mut client).await.unwrap();
    let pid: i32 = guarded.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    shop.admin.execute("SELECT pg_terminate_backend($1, 10000)", &[&pid]).await.unwrap();
    let error = guarded.commit().await.unwrap_err();
    assert!(matches!(&error, Error::TransactionLost(_)) && error.is_in_doubt(), "{error:?}");
    let error = lease.guard(&mut client).await.map(drop).unwrap_err();
    assert!(matches!(&error, Error::TransactionLost(_)) && !error.is_in_doubt(), "{error:?}");
    lease.check().unwrap();
    lease.release().await.unwrap();
}

#[tokio::test]
async fn several_leases() {
    let shop = Shop::new("several").await;
    let lease = shop.fence.lease(["several:8", "several:7"]).ttl(LONG).acquire().await.unwrap();
    let mut client = client().await;
    shop.pay(lease.guard(&mut client).await.unwrap()).await.unwrap();
    assert!(lease.renew().await.unwrap().is_some());
    let wait = Duration::from_millis(600);
    assert!(
        shop.fence
            .lease(["several:7", "several:9"])
            .wait(wait)
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    lease.guard(&mut client).await.unwrap().commit_and_release().await.unwrap();
    assert!(!shop.is_held("several:7").await && !shop.is_held("several:8").await);
}

#[tokio::test]
async fn a_guard_that_is_dropped_where_it_waits_leaves_nothing() {
    let shop = Shop::new("dropped_guard").await;
    let lease = shop.lease().await;
    let mut client = bare_client().await;
    let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    for micros in [0, 100, 200, 400, 800, 1600, 3200] {
        let guards = async {
            let guarded = lease.guard(&mut client).await?;
            guarded.execute(&shop.set("undone"), &[]).await?;
            pending::<Result<(), Error>>().await
        };
        assert!(tokio::time::timeout(Duration::from_micros(micros), guards).await.is_err());
        // What the drop has sent comes first.
        client.batch_execute("").await.unwrap();
        let sql = "SELECT state FROM pg_stat_activity WHERE pid = $1";
        let state = shop.admin.query_one(sql, &[&pid]).await.unwrap();
        assert_eq!(state.get::<_, &str>(0), "idle");
    }
    assert_eq!(shop.guards().await, 0);
    assert_eq!(shop.status().await, "new");
    shop.pay(lease.guard(&mut client).await.unwrap()).await.unwrap();
    lease.release().await.unwrap();
    assert_eq!(shop.status().await, "paid");
}

#[tokio::test]
async fn a_loss_ends_a_statement_that_hangs() {
    let shop = Shop::new("hanging").await;
    let before = tasks();
    for is_bare in [true, false] {
        let request = shop.fence.lease(shop.order()).ttl(Duration::from_secs(3));
        let lease = request.acquire().await.unwrap();
        let (mut bare, mut connected) = (bare_client().await, client().await);
        // Else the server goes on until the statement's end, and nobody is granted the lease before.
        connected.batch_execute("SET client_connection_check_interval = 200").await.unwrap();
        let guarded = match is_bare {
            true => lease.guard(&mut bare).await.unwrap(),
            false => lease.guard(&mut connected).await.unwrap(),
        };
        shop.revoke().await;
        let slept = tokio::time::timeout(PATIENCE, guarded.batch_execute("SELECT pg_sleep(10)"))
            .await
            .unwrap();
        assert_eq!(lost_by(&slept.unwrap_err()), Reason::Gone);
        assert_eq!(lost_by(&guarded.commit().await.unwrap_err()), Reason::Gone);
        wait_until("the guard ends", async || shop.guards().await == 0).await;
        if !is_bare {
            assert!(connected.is_closed());
        }
    }
    wait_until("its tasks have ended", async || tasks() == before).await;
}

#[tokio::test]
async fn what_the_driver_sends_for_arguments() {
    // As the table of drivers on the clients' common page has it.
    let client = client().await;
    let token = client.query_one("SELECT set_config('pg_fence.token', $1, true)", &[&34_i64]).await;
    assert!(token.unwrap_err().to_string().contains("error serializing parameter 0"));
    let ttl = client.query_one("SELECT lease_acquire('sent', ttl => $1)", &[&"30 s"]).await;
    assert!(ttl.unwrap_err().to_string().contains("error serializing parameter 0"));
    let sql =
        "SELECT lease_acquire('sent', ttl => $1::text::interval, metadata => $2::text::jsonb)";
    let row = client.query_one(sql, &[&"1500 milliseconds", &r#"{"run": 7}"#]).await.unwrap();
    assert!(row.get::<_, Option<i64>>(0).is_some());
}

// Leading

#[tokio::test]
async fn leading_ends_with_the_works_result_or_error() {
    let shop = Shop::new("led").await;
    let request = shop.fence.lease(shop.order()).ttl(LONG);
    let held = request.clone().lead(async |lease| Ok::<_, Error>(lease.held()));
    assert!(held.await.unwrap());
    let failed = request.lead(async |_| Err::<(), _>(Own::OutOfStock));
    assert!(matches!(failed.await, Err(Own::OutOfStock)));
    assert!(!shop.is_held("led:7").await);
}

#[tokio::test]
async fn a_loss_leads_again() {
    let shop = Shop::new("led_again").await;
    let mut tokens = Vec::new();
    let request = shop.fence.lease(shop.order()).ttl(Duration::from_secs(6));
    let led = request.lead(|lease| {
        tokens.push(lease.token());
        let (shop, count) = (&shop, tokens.len());
        async move {
            match count {
                // Told by a verb, by the heartbeat, by the server.
                1 => {
                    shop.revoke().await;
                    lease.renew().await?;
                }
                2 => {
                    shop.revoke().await;
                    pending::<()>().await;
                }
                3 => {
                    shop.revoke().await;
                    lease.guard(&mut bare_client().await).await?.commit().await?;
                }
                _ => {}
            }
            Ok::<_, Error>(count)
        }
    });
    assert_eq!(led.await.unwrap(), 4);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

#[tokio::test]
async fn leading_can_be_stopped() {
    let shop = Shop::new("stopped").await;
    let request = shop.fence.lease(shop.order()).ttl(LONG);
    let soon = || tokio::time::sleep(Duration::from_millis(500));
    let forever = async |_| pending::<Result<(), Error>>().await;
    let lease = shop.lease().await;
    assert!(request.clone().lead_until(soon(), forever).await.unwrap().is_none());
    lease.release().await.unwrap();
    assert!(request.lead_until(soon(), forever).await.unwrap().is_none());
    assert!(!shop.is_held("stopped:7").await);
}

#[tokio::test]
async fn what_is_done_under_a_lease_can_be_a_task() {
    let shop = Shop::new("spawned").await;
    let (fence, name, sql) = (shop.fence.clone(), shop.order(), shop.set("paid"));
    let task = tokio::spawn(async move {
        let hold = fence.lease(name.as_str()).hold(async |lease| {
            let mut client = client().await;
            let guarded = lease.guard(&mut client).await?;
            guarded.execute(&sql, &[]).await?;
            guarded.commit().await
        });
        hold.await?;
        fence.lease(name.as_str()).lead(async |lease| Ok::<_, Error>(lease.held())).await
    });
    assert!(task.await.unwrap().unwrap());
    assert_eq!(shop.status().await, "paid");
}

// A lease that somebody else grants

impl Shop {
    async fn adopt(&self, token: i64) -> Result<Adopted, Error> {
        self.fence.adopt(self.order(), token).acquire().await
    }

    /// As a failover to a standby that has missed the adoption does.
    async fn forget(&self) {
        self.revoke().await;
        self.admin.execute("SELECT lease_forget($1)", &[&self.order()]).await.unwrap();
    }

    async fn row(&self) -> String {
        let sql = format!("SELECT status || ' ' || coalesce(fence, 0) FROM {}", self.name);
        self.value(&sql, &[]).await
    }

    /// How many wait to adopt.
    async fn adopting(&self) -> i64 {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT lease_adopt%'";
        self.value(sql, &[]).await
    }

    async fn guarded(&self, adopted: &Adopted, on: &mut Connected) -> Result<(), Error> {
        self.pay(adopted.guard(on).await?).await
    }

    async fn presented(&self, adopted: &Adopted, on: &mut Connected) -> Result<(), Error> {
        self.pay(adopted.present(on).await?).await
    }
}

#[tokio::test]
async fn an_adopted_lease_s_number_is_judged() {
    let shop = Shop::new("judged").await;
    let mut on = client().await;
    let number = 1 << 60;
    let request = shop.fence.adopt(shop.order(), number);
    let first = request.holder("it's A").metadata(json!({ "run": 7 })).acquire().await.unwrap();
    let sql = "SELECT holder || ' ' || metadata || ' ' || adopted FROM lease_info($1)";
    assert_eq!(shop.value::<String>(sql, &[&shop.order()]).await, r#"it's A {"run": 7} true"#);
    shop.guarded(&first, &mut on).await.unwrap();
    shop.presented(&first, &mut on).await.unwrap();
    assert_eq!(shop.row().await, format!("paid {number}"));
    let second = shop.adopt(number + 1).await.unwrap();
    let refused = shop.presented(&first, &mut on).await;
    assert!(matches!(refused, Err(Error::NotSpeaking(_))), "{refused:?}");
    // Refused once, it looks before it begins.
    let looked = first.present(&mut on).await.map(drop);
    assert!(matches!(looked, Err(Error::StaleToken(_))), "{looked:?}");
    let Err(Error::StaleToken(stale)) = shop.guarded(&first, &mut on).await else { panic!() };
    assert_eq!(stale.detail()["presented"], number);
    let again = shop.adopt(number).await;
    assert!(matches!(again, Err(Error::StaleToken(_))), "{again:?}");
    shop.guarded(&second, &mut on).await.unwrap();
    second.release().await.unwrap();
    assert_eq!(first.release().await.unwrap_err().reason(), Reason::Gone);
    assert_eq!(shop.row().await, format!("paid {}", number + 1));
    shop.forget().await;
}

#[tokio::test]
async fn an_adoption_is_none_while_an_older_number_is_guarded() {
    let shop = Shop::new("older").await;
    let mut on = client().await;
    let first = shop.adopt(33).await.unwrap();
    let transaction = first.guard(&mut on).await.unwrap();
    transaction.batch_execute(&shop.set("paid")).await.unwrap();
    assert!(shop.fence.adopt(shop.order(), 34).try_acquire().await.unwrap().is_none());
    assert!(matches!(shop.adopt(34).await, Err(Error::LeaseTaken(_))));
    let waiting = |token| shop.fence.adopt(shop.order(), token).wait(LONG).acquire();
    {
        let mut given_up = pin!(waiting(35));
        let polled = tokio::time::timeout(Duration::ZERO, &mut given_up).await;
        assert!(polled.is_err(), "it does not wait");
        wait_until("it waits", async || shop.adopting().await == 1).await;
    }
    wait_until("nobody waits", async || shop.adopting().await == 0).await;
    let next = tokio::spawn(waiting(36));
    wait_until("it waits", async || shop.adopting().await == 1).await;
    transaction.commit().await.unwrap();
    next.await.unwrap().unwrap().release().await.unwrap();
    assert_eq!(shop.row().await, "paid 33");
    shop.forget().await;
}

#[tokio::test]
async fn each_transaction_makes_an_adopted_number_known() {
    let shop = Shop::new("known").await;
    for level in ["read committed", "repeatable read"] {
        let mut on = client().await;
        on.batch_execute(&format!("SET default_transaction_isolation = '{level}'")).await.unwrap();
        let adopted = shop.adopt(33).await.unwrap();
        shop.forget().await;
        shop.guarded(&adopted, &mut on).await.unwrap();
        shop.forget().await;
        let refused = shop.presented(&adopted, &mut on).await;
        assert!(matches!(refused, Err(Error::NotSpeaking(_))), "{refused:?}");
        shop.presented(&adopted, &mut on).await.unwrap();
        adopted.release().await.unwrap();
        shop.forget().await;
    }
}

#[tokio::test]
async fn an_older_number_may_come_first_after_a_failover() {
    let shop = Shop::new("first").await;
    let (mut on, mut other) = (client().await, client().await);
    let newer = shop.adopt(34).await.unwrap();
    shop.forget().await;
    let older = shop.adopt(33).await.unwrap();
    let transaction = older.guard(&mut on).await.unwrap();
    let taken = shop.guarded(&newer, &mut other).await;
    assert!(matches!(taken, Err(Error::LeaseTaken(_))), "{taken:?}");
    shop.pay(transaction).await.unwrap();
    shop.guarded(&newer, &mut other).await.unwrap();
    newer.release().await.unwrap();
    assert_eq!(shop.row().await, "paid 34");
    shop.forget().await;
}

#[tokio::test]
async fn an_adopted_lease_that_was_released_is_over() {
    let shop = Shop::new("once").await;
    let mut on = client().await;
    let adopted = shop.adopt(33).await.unwrap();
    let transaction = adopted.guard(&mut on).await.unwrap();
    transaction.batch_execute(&shop.set("paid")).await.unwrap();
    transaction.commit_and_release().await.unwrap();
    assert_eq!(lost_by(&shop.guarded(&adopted, &mut on).await.unwrap_err()), Reason::Released);
    adopted.release().await.unwrap();
    assert!(matches!(shop.adopt(33).await, Err(Error::StaleToken(_))));
    assert_eq!(shop.row().await, "paid 33");
    shop.forget().await;
}

#[tokio::test]
async fn a_name_is_granted_here_or_adopted() {
    let shop = Shop::new("here").await;
    let lease = shop.lease().await;
    assert_eq!(shop.adopt(33).await.unwrap_err().sqlstate(), Some("55000"));
    lease.release().await.unwrap();
}
