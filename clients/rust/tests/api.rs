//! The part that the scenarios of all clients do not show: what is Rust's own.
//!
//! `DATABASE_URL=postgresql://… cargo test`. The database has the extension and is otherwise of no use: each test
//! makes a table in it.

use pg_fence_client::{
    Connected, Error, Event, EventKind, Fence, Lease, Reason, classify, connect, open,
};
use std::error::Error as StdError;
use std::future::pending;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio_postgres::{Config, NoTls};
use tokio_util::sync::CancellationToken;

const LONG: Duration = Duration::from_secs(300);

fn url() -> String {
    std::env::var("DATABASE_URL").expect("DATABASE_URL is set")
}

async fn client() -> Connected {
    connect(&url(), NoTls).await.unwrap()
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

    async fn status(&self) -> String {
        let sql = format!("SELECT status FROM {}", self.name);
        self.admin.query_one(&sql, &[]).await.unwrap().get(0)
    }

    async fn state(&self, name: &str) -> Option<String> {
        let row = self.admin.query_opt("SELECT state FROM lease_info($1)", &[&name]).await.unwrap();
        row.map(|row| row.get(0))
    }

    async fn revoke(&self) {
        self.admin.execute("SELECT lease_revoke($1)", &[&self.order()]).await.unwrap();
    }
}

#[tokio::test]
async fn a_lease_is_held_until_it_is_dropped_and_a_fence_that_was_closed_gives_none() {
    let shop = Shop::new("dropped").await;
    let lease = shop.lease().await;
    assert!(lease.held() && lease.check().is_ok() && lease.remaining() > LONG / 2);
    let other = shop.fence.lease(shop.order()).holder("other").acquire().await;
    let said = other.as_ref().err().map(Error::to_string).unwrap_or_default();
    let Err(Error::LeaseTaken { holder, remaining, .. }) = other else { panic!("{other:?}") };
    assert!(holder.is_some_and(|holder| holder.contains('/')));
    assert!(remaining.is_some_and(|left| left > LONG / 2));
    let at_most = said.split(" for ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok());
    assert!(
        Duration::from_secs(at_most.expect(&said)) >= remaining.unwrap(),
        "{said} {remaining:?}"
    );
    let clone = lease.clone();
    drop(lease);
    assert_eq!(shop.state(&shop.order()).await.as_deref(), Some("held"));
    drop(clone);
    // In the background.
    shop.fence.lease(shop.order()).wait(LONG).acquire().await.unwrap().release().await.unwrap();
    shop.fence.close().await;
    assert!(matches!(shop.fence.lease("x").acquire().await, Err(Error::Invalid(_))));
}

#[tokio::test]
async fn guards_commit_release_and_roll_back() {
    let shop = Shop::new("guards").await;
    let lease = shop.lease().await;
    let mut client = client().await;
    let guard = lease.guard(&mut client).await.unwrap();
    guard.execute(&shop.set("undone"), &[]).await.unwrap();
    drop(guard);
    assert_eq!(shop.status().await, "new");
    // In a transaction that is open it is a savepoint, and its end is left to the code that began it.
    let mut outer = client.transaction().await.unwrap();
    let guard = lease.guard(&mut outer).await.unwrap();
    guard.execute(&shop.set("paid"), &[]).await.unwrap();
    guard.commit().await.unwrap();
    assert_eq!(shop.status().await, "new");
    outer.commit().await.unwrap();
    assert_eq!(shop.status().await, "paid");
    assert!(matches!(shop.fence.guard(&mut client, []).await, Err(Error::Invalid(_))));
    let guard = lease.guard(&mut client).await.unwrap();
    guard.batch_execute(&shop.set("sent")).await.unwrap();
    guard.commit_and_release().await.unwrap();
    assert_eq!(shop.status().await, "sent");
    assert_eq!(shop.state(&shop.order()).await.as_deref(), Some("free"));
    assert!(matches!(lease.check(), Err(Error::LeaseLost { reason: Reason::Released, .. })));
}

#[tokio::test]
async fn a_lease_that_is_dropped_is_kept_while_its_guard_runs() {
    let shop = Shop::new("kept").await;
    let mut client = client().await;
    let guard = shop.lease().await.guard(&mut client).await.unwrap();
    // The fence does one after the other: a release would be through by now.
    shop.fence.lease("kept:8").acquire().await.unwrap().release().await.unwrap();
    assert_eq!(shop.state(&shop.order()).await.as_deref(), Some("held"));
    guard.execute(&shop.set("paid"), &[]).await.unwrap();
    guard.commit().await.unwrap();
    assert_eq!(shop.status().await, "paid");
    shop.fence.lease(shop.order()).wait(LONG).acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_number_is_of_one_holder() {
    let shop = Shop::new("adopted").await;
    let recorded = async || {
        let sql = "SELECT holder FROM lease_info('elsewhere')";
        shop.admin.query_one(sql, &[]).await.unwrap().get::<_, Option<String>>(0)
    };
    let mut client = client().await;
    for same in [&shop.fence, &Fence::new(&url()).unwrap()] {
        same.adopted("elsewhere", 7).guard(&mut client).await.unwrap().commit().await.unwrap();
    }
    let process = format!("/{}/", std::process::id());
    assert!(recorded().await.is_some_and(|holder| holder.contains(&process)));
    let named = shop.fence.adopted("elsewhere", 8).holder("night shift");
    named.guard(&mut client).await.unwrap().commit().await.unwrap();
    assert_eq!(recorded().await.as_deref(), Some("night shift"));
    let taken = shop.fence.adopted("elsewhere", 8).guard(&mut client).await.err();
    shop.admin
        .batch_execute("SELECT lease_revoke('elsewhere'), lease_forget('elsewhere')")
        .await
        .unwrap();
    let Some(Error::LeaseTaken { holder, .. }) = taken else { panic!("{taken:?}") };
    assert_eq!(holder.as_deref(), Some("night shift"));
}

#[tokio::test]
async fn a_lease_of_another_role_names_the_way_out() {
    let shop = Shop::new("roles").await;
    let role = |name: &str| {
        let mut config: Config = url().parse().unwrap();
        config.user(name).clone()
    };
    for name in ["rust_login_1", "rust_login_2"] {
        let sql = format!(
            "DROP ROLE IF EXISTS {name}; CREATE ROLE {name} LOGIN; SELECT fence_grant('{name}')"
        );
        shop.admin.batch_execute(&sql).await.unwrap();
    }
    let fence = Fence::at([role("rust_login_1")], NoTls);
    let lease = fence.lease("roles:8").acquire().await.unwrap();
    let mut other = open(&[role("rust_login_2")], NoTls, LONG).await.unwrap();
    let told = lease.guard(&mut other).await.err().map(|error| error.to_string());
    fence.close().await;
    drop(other);
    let sql = "SELECT fence_revoke('rust_login_1'), fence_revoke('rust_login_2'); DROP ROLE rust_login_1, rust_login_2";
    shop.admin.batch_execute(sql).await.unwrap();
    let told = told.unwrap_or_default();
    assert!(told.contains("act as one role (options=-c role="), "{told}");
    assert!(!told.contains("fence_grant"), "{told}");
}

/// The verbs' futures are `Send`.
#[tokio::test]
async fn what_waits_can_be_spawned() {
    let shop = Shop::new("spawned").await;
    let (lease, fence, set) = (shop.lease().await, shop.fence.clone(), shop.set("paid"));
    let work = async move {
        let mut client = client().await;
        let mut guard = lease.guard(&mut client).await?;
        let inner = lease.guard(&mut guard).await?;
        inner.execute(&set, &[]).await?;
        inner.commit().await?;
        guard.commit().await?;
        let guard = fence.guard(&mut client, [&lease]).await?;
        guard.commit_and_release().await?;
        let other = fence.lease("spawned:8").acquire().await?;
        other.run(async { other.release().await }).await?
    };
    tokio::spawn(work).await.unwrap().unwrap();
    assert_eq!(shop.status().await, "paid");
}

#[tokio::test]
async fn a_loss_ends_the_work_and_comes_out_as_a_type() {
    let shop = Shop::new("losses").await;
    let request = shop.fence.lease(shop.order()).ttl(Duration::from_secs(1));
    let lost = request.clone().hold(async |lease: Lease| {
        shop.revoke().await;
        lease.run(pending::<()>()).await?;
        Ok::<(), Error>(())
    });
    assert!(matches!(lost.await, Err(Error::LeaseLost { reason: Reason::Gone, .. })));
}

#[tokio::test]
async fn errors_are_found_however_deep_they_are() {
    let shop = Shop::new("deep").await;
    let refused = shop.admin.batch_execute(&shop.set("unfenced")).await.unwrap_err();
    let wrapped: Box<dyn StdError + Send + Sync> = Box::new(Error::other(refused));
    let Some(Error::Refused(refused)) = classify(&Error::other(wrapped)) else { panic!() };
    assert_eq!(refused.sqlstate, "PF002");
    assert_eq!(refused.detail["relation"], format!("public.{}", shop.name));
    assert!(refused.hint.is_some());
    let other = shop.admin.batch_execute("SELECT 1 / 0").await.unwrap_err();
    assert!(classify(&other).is_none());
    let elsewhere = Fence::new(&url()).unwrap().in_schema("nowhere");
    assert!(matches!(elsewhere.lease("x").acquire().await, Err(Error::NotInstalled(_))));
    let nobody = Fence::new("host=127.0.0.1 port=1 user=me").unwrap();
    let Err(failed @ Error::NotConnected(..)) = nobody.lease("x").acquire().await else { panic!() };
    assert!(failed.to_string().contains("\"127.0.0.1\", port 1, as user \"me\""), "{failed}");
}

#[tokio::test]
async fn several_are_taken_and_guarded_at_once() {
    let shop = Shop::new("several").await;
    let fence = &shop.fence;
    let both = fence.lease(["several:a", "several:7"]).acquire().await.unwrap();
    assert_eq!(both.names().len(), 2);
    let third = fence.lease("several:b").holder("me").acquire().await.unwrap();
    let none = fence.lease(Vec::<String>::new()).acquire().await;
    assert!(matches!(none, Err(Error::Refused(refused)) if refused.sqlstate == "22023"));
    let other = fence.lease("several:b").acquire().await;
    assert!(matches!(other, Err(Error::LeaseTaken { holder: Some(holder), .. }) if holder == "me"));
    let mut client = client().await;
    let guard = fence.guard(&mut client, [&both, &third]).await.unwrap();
    guard.execute(&shop.set("both"), &[]).await.unwrap();
    guard.commit().await.unwrap();
    assert_eq!(shop.status().await, "both");
    both.release().await.unwrap();
    assert_eq!(shop.state("several:a").await.as_deref(), Some("free"));
    fence.close().await;
    assert_eq!(shop.state("several:b").await.as_deref(), Some("free"));
}

#[tokio::test]
async fn events_are_told_in_their_order() {
    let shop = Shop::new("events").await;
    let told: Arc<Mutex<Vec<EventKind>>> = Arc::default();
    let hears = told.clone();
    let hears = move |event: &Event| {
        hears.lock().unwrap_or_else(PoisonError::into_inner).push(event.kind);
        panic!("which takes nothing from the lease");
    };
    let fence = shop.fence.clone().on_event(hears);
    let request = fence.lease(shop.order()).ttl(Duration::from_millis(900));
    let lease = request.acquire().await.unwrap();
    while told.lock().unwrap().len() < 2 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    lease.release().await.unwrap();
    let mut told = told.lock().unwrap().clone();
    told.dedup();
    assert_eq!(told, [EventKind::Acquired, EventKind::Renewed, EventKind::Released]);
}

/// Which the program's own runtime may: the heartbeat has a thread of its own.
#[tokio::test(flavor = "current_thread")]
async fn work_that_blocks_does_not_lose_its_lease() {
    let shop = Shop::new("blocks").await;
    let request = shop.fence.lease(shop.order()).ttl(Duration::from_millis(600));
    let lease = request.acquire().await.unwrap();
    std::thread::sleep(Duration::from_secs(2));
    lease.check().unwrap();
    lease.release().await.unwrap();
}

#[tokio::test]
async fn leading_waits_for_the_work_that_was_stopped() {
    let shop = Shop::new("leads").await;
    let (name, stop) = (shop.order(), CancellationToken::new());
    let led = shop.fence.lead(&name, LONG, &stop, async |lease: Lease| {
        stop.cancel();
        tokio::time::sleep(Duration::from_millis(100)).await;
        lease.check()?;
        Ok(lease.token())
    });
    assert!(led.await.unwrap().is_some());
    assert_eq!(shop.state(&name).await.as_deref(), Some("free"));
    // The server may be a standby still.
    let mut read_only: Config = url().parse().unwrap();
    read_only.options("-c default_transaction_read_only=on");
    let (fence, stop) = (Fence::at([read_only], NoTls), CancellationToken::new());
    let waits = fence.lead(&name, LONG, &stop, async |_| Ok(()));
    let stops = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        stop.cancel();
    };
    assert!(tokio::join!(waits, stops).0.unwrap().is_none());
}

#[cfg(feature = "sqlx")]
#[tokio::test]
async fn a_connection_of_sqlx_is_guarded_alike() {
    use sqlx::{Connection, Executor, PgConnection};
    let shop = Shop::new("of_sqlx").await;
    let lease = shop.lease().await;
    let mut connection = PgConnection::connect(&url()).await.unwrap();
    let refused = connection.execute(shop.set("unfenced").as_str()).await.unwrap_err();
    assert!(matches!(Error::from(refused), Error::Refused(refused) if refused.sqlstate == "PF002"));
    let mut guard = lease.guard(&mut connection).await.unwrap();
    guard.execute(shop.set("paid").as_str()).await.unwrap();
    guard.commit().await.unwrap();
    assert_eq!(shop.status().await, "paid");
    let fails = async move {
        for (statement, releases, is_in_doubt) in [
            ("SELECT 1 / 0", false, false),
            ("SELECT 1 / 0", true, false),
            ("COMMIT; BEGIN", false, true),
        ] {
            let mut guard = lease.guard(&mut connection).await?;
            let _ = guard.execute(statement).await;
            let _ = guard.execute("CREATE TABLE undone ()").await;
            let failed =
                if releases { guard.commit_and_release().await } else { guard.commit().await };
            assert!(
                matches!(failed, Err(Error::TransactionLost { in_doubt, .. }) if in_doubt == is_in_doubt)
            );
        }
        Ok::<_, Error>((lease, connection))
    };
    let (lease, mut connection) = tokio::spawn(fails).await.unwrap().unwrap();
    let mut guard = lease.guard(&mut connection).await.unwrap();
    let set = shop.set("sent");
    lease.run(guard.execute(set.as_str())).await.unwrap().unwrap();
    let mut inner = lease.guard(&mut **guard).await.unwrap();
    inner.execute(shop.set("undone").as_str()).await.unwrap();
    drop(inner);
    guard.commit_and_release().await.unwrap();
    assert_eq!(shop.status().await, "sent");
    assert_eq!(shop.state(&shop.order()).await.as_deref(), Some("free"));
}

/// Whatever becomes of the guard that was about to release it.
#[tokio::test]
async fn a_lease_is_kept_after_a_release_that_was_given_up() {
    let shop = Shop::new("given_up").await;
    let request = shop.fence.lease(shop.order()).ttl(Duration::from_secs(1));
    let lease = request.acquire().await.unwrap();
    let mut client = client().await;
    let mut locks = connect(&url(), NoTls).await.unwrap();
    let locks = locks.transaction().await.unwrap();
    locks.execute("SELECT lease_renew($1, $2)", &[&shop.order(), &lease.token()]).await.unwrap();
    let guard = lease.guard(&mut client).await.unwrap();
    let given_up = tokio::time::timeout(Duration::from_millis(200), guard.commit_and_release());
    assert!(given_up.await.is_err());
    locks.commit().await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    lease.check().unwrap();
}

#[cfg(feature = "blocking")]
#[test]
fn the_verbs_of_programs_that_are_not_asynchronous() {
    let fence = pg_fence_client::blocking::Fence::new(&url()).unwrap();
    let mut client = fence.wait(client());
    let table = "DROP TABLE IF EXISTS blocks_not; CREATE TABLE blocks_not (id bigint, status text);
        INSERT INTO blocks_not VALUES (7, 'new'); SELECT fence_protect('blocks_not', lease => 'bn:{id}')";
    fence.wait(client.batch_execute(table)).unwrap();
    let update = "UPDATE blocks_not SET status = 'paid'";
    let lease = fence.wait(fence.lease("bn:7").ttl(LONG).acquire()).unwrap();
    assert!(matches!(fence.wait(fence.lease("bn:7").acquire()), Err(Error::LeaseTaken { .. })));
    let guard = fence.wait(lease.guard(&mut client)).unwrap();
    fence.wait(guard.execute(update, &[])).unwrap();
    fence.wait(guard.commit_and_release()).unwrap();
    // Its work may wait, too.
    let stop = CancellationToken::new();
    let led = fence.wait(fence.lead("bn:7", LONG, &stop, async |lease: Lease| {
        let mut client = fence.wait(connect(&url(), NoTls))?;
        let guard = fence.wait(lease.guard(&mut client))?;
        fence.wait(guard.execute(update, &[]))?;
        fence.wait(guard.commit())?;
        Ok(lease.token())
    }));
    assert!(led.unwrap().is_some());
    fence.wait(fence.close());
    assert!(matches!(fence.wait(fence.lease("x").acquire()), Err(Error::Invalid(_))));
}
