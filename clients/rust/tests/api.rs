//! What is Rust's own: the shape of the API, its drivers, its types. What a client decides is
//! played by vectors, and what a process shows by the scenarios of all clients.
//!
//! `DATABASE_URL=postgresql://… cargo test`. The database has the extension and is otherwise of no
//! use: each test makes a table in it.

use pg_fence_client::{
    Connected, Error, EventKind, Fence, Lease, LeaseRequest, Moment, Reason, WaitsFor, classify,
    connect, open,
};
use std::error::Error as StdError;
use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio_postgres::config::SslMode;
use tokio_postgres::{Config, NoTls};
use tokio_util::sync::CancellationToken;

const LONG: Duration = Duration::from_secs(300);
const SHORT: Duration = Duration::from_secs(1);

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

    async fn text(&self, sql: &str) -> String {
        self.admin.query_one(sql, &[]).await.unwrap().get(0)
    }

    async fn status(&self) -> String {
        self.text(&format!("SELECT status FROM {}", self.name)).await
    }

    async fn state(&self) -> String {
        self.text(&format!("SELECT state FROM lease_info('{}')", self.order())).await
    }
}

#[tokio::test]
async fn a_lease_is_held_until_its_last_clone_is_dropped() {
    let shop = Shop::new("dropped").await;
    let lease = shop.lease().await;
    assert!(lease.held() && lease.check().is_ok() && lease.remaining() > LONG / 2);
    let other = shop.fence.lease(shop.order()).holder("other").acquire().await;
    let said = other.as_ref().err().map(Error::to_string).unwrap_or_default();
    let Err(Error::LeaseTaken { holder, remaining, waits_for, .. }) = other else { panic!() };
    assert!(holder.is_some_and(|holder| holder.contains('/')) && remaining > Some(LONG / 2));
    assert!(waits_for == Some(WaitsFor::Ttl) && said.contains(" s at the most unless"), "{said}");
    let mut client = client().await;
    let (clone, guard) = (lease.clone(), lease.guard(&mut client).await.unwrap());
    drop(lease);
    drop(clone);
    // The fence does one call after the other, so a release would be through by now.
    shop.fence.lease("dropped:8").acquire().await.unwrap().release().await.unwrap();
    assert_eq!(shop.state().await, "held");
    guard.execute(&shop.set("paid"), &[]).await.unwrap();
    guard.commit().await.unwrap();
    // In the background.
    shop.fence.lease(shop.order()).wait(LONG).acquire().await.unwrap().release().await.unwrap();
    shop.fence.close().await;
    assert!(matches!(shop.fence.lease("x").acquire().await, Err(Error::Closed)));
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
    assert!(matches!(shop.fence.guard(&mut client, []).await, Err(Error::Invalid(_))));
    // In a transaction that is open it is a savepoint. The lease lives on if that rolls back.
    let mut outer = client.transaction().await.unwrap();
    lease.guard(&mut outer).await.unwrap().commit_and_release().await.unwrap();
    lease.check().unwrap();
    outer.rollback().await.unwrap();
    let mut outer = client.transaction().await.unwrap();
    let guard = lease.guard(&mut outer).await.unwrap();
    guard.execute(&shop.set("paid"), &[]).await.unwrap();
    guard.commit().await.unwrap();
    assert_eq!(shop.status().await, "new");
    outer.commit().await.unwrap();
    let guard = lease.guard(&mut client).await.unwrap();
    guard.commit_and_release().await.unwrap();
    assert_eq!((shop.status().await.as_str(), shop.state().await.as_str()), ("paid", "free"));
    let over = lease.check();
    assert!(matches!(over, Err(Error::LeaseLost { reason: Reason::Released, .. })), "{over:?}");
}

/// The future of the release is dropped where it waits for somebody's lock.
#[tokio::test]
async fn a_lease_is_kept_after_a_release_that_was_given_up() {
    let shop = Shop::new("given_up").await;
    let lease = shop.fence.lease(shop.order()).ttl(SHORT).acquire().await.unwrap();
    let (mut client, mut locks) = (client().await, client().await);
    let locks = locks.transaction().await.unwrap();
    locks.execute("SELECT lease_renew($1, $2)", &[&shop.order(), &lease.token()]).await.unwrap();
    let guard = lease.guard(&mut client).await.unwrap();
    let given_up = tokio::time::timeout(SHORT / 5, guard.commit_and_release());
    assert!(given_up.await.is_err());
    locks.commit().await.unwrap();
    tokio::time::sleep(SHORT * 3).await;
    lease.check().unwrap();
}

#[tokio::test]
async fn a_number_is_of_one_holder() {
    let shop = Shop::new("adopted").await;
    let mut client = client().await;
    for same in [&shop.fence, &Fence::new(&url()).unwrap()] {
        same.adopted("elsewhere", 7).guard(&mut client).await.unwrap().commit().await.unwrap();
    }
    let recorded = shop.text("SELECT holder FROM lease_info('elsewhere')").await;
    assert!(recorded.contains(&format!("/{}/", std::process::id())), "{recorded}");
    let named = shop.fence.adopted("elsewhere", 8).holder("night shift");
    named.guard(&mut client).await.unwrap().commit().await.unwrap();
    let taken = shop.fence.adopted("elsewhere", 8).guard(&mut client).await.err();
    let forget = "SELECT lease_revoke('elsewhere'), lease_forget('elsewhere')";
    shop.admin.batch_execute(forget).await.unwrap();
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
    let sql = "SELECT fence_revoke('rust_login_1'), fence_revoke('rust_login_2');
        DROP ROLE rust_login_1, rust_login_2";
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
        let both = fence.lease(["spawned:8", "spawned:9"]).acquire().await?;
        fence.guard(&mut client, [&lease, &both]).await?.commit_and_release().await?;
        let other = fence.lease("spawned:8").acquire().await?;
        other.run(async { other.release().await }).await?
    };
    tokio::spawn(work).await.unwrap().unwrap();
    assert_eq!(shop.status().await, "paid");
}

#[tokio::test]
async fn a_loss_ends_the_work_and_comes_out_as_a_type() {
    let shop = Shop::new("losses").await;
    let lost = shop.fence.lease(shop.order()).ttl(SHORT).hold(async |lease: Lease| {
        shop.admin.execute("SELECT lease_revoke($1)", &[&shop.order()]).await?;
        lease.run(pending::<()>()).await?;
        Ok::<(), Error>(())
    });
    assert!(matches!(lost.await, Err(Error::LeaseLost { reason: Reason::Gone, .. })));
    let hangs = shop.fence.lease(shop.order()).at_most(SHORT).hold(async |_| pending().await);
    let lost: Result<(), Error> = hangs.await;
    assert!(matches!(lost, Err(Error::LeaseLost { reason: Reason::AtMost, .. })));
    // It is given back with the end of the work.
    shop.fence.close().await;
    assert_eq!(shop.state().await, "free");
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
    let Err(failed @ Error::NoConnection(..)) = nobody.lease("x").acquire().await else { panic!() };
    assert!(failed.to_string().contains("\"127.0.0.1\", port 1, as user \"me\""), "{failed}");
    assert!(matches!(nobody.lease("x").ttl(SHORT / 11).acquire().await, Err(Error::Invalid(_))));
}

/// Its callback may panic, and its own runtime may be blocked: the heartbeat has a thread.
#[tokio::test(flavor = "current_thread")]
async fn a_program_that_blocks_and_panics_keeps_its_lease() {
    let shop = Shop::new("blocks").await;
    let told: Arc<Mutex<Vec<EventKind>>> = Arc::default();
    let hears = told.clone();
    let fence = shop.fence.clone().on_event(move |event| {
        hears.lock().unwrap_or_else(|error| error.into_inner()).push(event.kind);
        // A panic without a trace, which would take its time from the heartbeat.
        std::panic::resume_unwind(Box::new("which takes nothing from the lease"));
    });
    let lease = fence.lease(shop.order()).ttl(SHORT * 2).acquire().await.unwrap();
    std::thread::sleep(SHORT * 3);
    lease.check().unwrap();
    lease.release().await.unwrap();
    fence.close().await;
    let mut told = told.lock().unwrap_or_else(|error| error.into_inner()).clone();
    told.dedup();
    let released = EventKind::Released { confirmed: true };
    assert_eq!(told, [EventKind::Acquired, EventKind::Renewed, released]);
}

#[tokio::test]
async fn leading_waits_for_the_work_that_was_stopped() {
    let shop = Shop::new("leads").await;
    let (name, stop) = (shop.order(), CancellationToken::new());
    let led = shop.fence.lead(&name, LONG, &stop, async |lease: Lease| {
        stop.cancel();
        tokio::time::sleep(SHORT / 10).await;
        lease.check()?;
        Ok(lease.token())
    });
    assert!(led.await.unwrap().is_some());
    assert_eq!(shop.state().await, "free");
    // The server may be a standby still.
    let mut read_only: Config = url().parse().unwrap();
    read_only.options("-c default_transaction_read_only=on");
    let (fence, stop) = (Fence::at([read_only], NoTls), CancellationToken::new());
    let waits = fence.lead(&name, LONG, &stop, async |_| Ok(()));
    let stops = async {
        tokio::time::sleep(SHORT / 3).await;
        stop.cancel();
    };
    assert!(tokio::join!(waits, stops).0.unwrap().is_none());
}

/// The lines of the log.
struct Lines(Mutex<Vec<String>>);

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, line: &log::Record<'_>) {
        self.0.lock().unwrap_or_else(|error| error.into_inner()).push(line.args().to_string());
    }

    fn flush(&self) {}
}

#[tokio::test]
async fn what_never_opens_is_told_at_once_and_an_outage_is_one_line_of_the_log() {
    let at = |change: fn(&mut Config) -> &mut Config| {
        let mut config: Config = url().parse().unwrap();
        Fence::at([change(&mut config).clone()], NoTls)
    };
    let own = Fence::with_opener(|| async { Err(Error::other("no secret")) });
    for (words, fence) in [
        ("TLS", at(|config| config.ssl_mode(SslMode::Require))),
        ("does not exist", at(|config| config.dbname("nowhere"))),
        ("no secret", own),
    ] {
        let wait = fence.lease("x").wait(LONG).acquire();
        let wait = tokio::time::timeout(SHORT * 5, wait).await.expect("at once").unwrap_err();
        let stop = CancellationToken::new();
        let lead = fence.lead("x", SHORT, &stop, async |_| Ok(()));
        let lead = tokio::time::timeout(SHORT * 5, lead).await.expect("at once").unwrap_err();
        assert!(wait.to_string().contains(words), "{wait}");
        assert!(lead.to_string().contains(words), "{lead}");
    }
    static LINES: Lines = Lines(Mutex::new(Vec::new()));
    log::set_logger(&LINES).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let nobody = Fence::new("host=127.0.0.1 port=1 user=nobody").unwrap();
    let waits = nobody.lease("x").wait(SHORT).acquire().await;
    assert!(matches!(waits, Err(Error::NoConnection(..))), "{waits:?}");
    let lines = LINES.0.lock().unwrap_or_else(|error| error.into_inner());
    let line = "no lease could be acquired, and it is tried again: cannot connect to a server: \
                \"127.0.0.1\", port 1, as user \"nobody\"";
    assert_eq!(lines.iter().filter(|one| one.starts_with(line)).count(), 1, "{lines:?}");
}

/// Of both modes, with a key of two columns.
#[tokio::test]
async fn a_row_is_a_lease() {
    for mode in ["monotonic", "managed"] {
        let (fence, admin) = (Fence::new(&url()).unwrap(), client().await);
        let table = format!(
            "DROP TABLE IF EXISTS {mode}; CREATE TABLE {mode} (part text, id int, state text,
                PRIMARY KEY (id, part)); INSERT INTO {mode} VALUES ('a', 1, 'ready');
            SELECT fence_protect('{mode}', mode => '{mode}', deadline => 'held_until')"
        );
        admin.batch_execute(&table).await.unwrap();
        let claim = format!(
            "UPDATE {mode} SET held_until = clock_timestamp() + '2 s', state = 'running'
            WHERE held_until IS NULL OR held_until < clock_timestamp() RETURNING fence"
        );
        let keep = |token, before: Option<Moment>| -> LeaseRequest {
            let request = fence.keep_row(mode, &[&1, &"a"], token, SHORT * 2);
            before.into_iter().fold(request, LeaseRequest::claimed)
        };
        let before = Moment::now();
        let token: i64 = admin.query_one(&claim, &[]).await.unwrap().get(0);
        let lease = keep(token, Some(before)).acquire().await.unwrap();
        assert_eq!(lease.names()[1], r#"["1","a"]"#);
        // It is renewed, and while its own transaction has the row it is not lost.
        let mut client = client().await;
        tokio::time::sleep(SHORT * 3).await;
        let guard = lease.guard(&mut client).await.unwrap();
        let half = format!("UPDATE {mode} SET state = 'half'");
        guard.execute(&half, &[]).await.unwrap();
        tokio::time::sleep(SHORT * 3).await;
        lease.check().unwrap();
        guard.commit().await.unwrap();
        // That transaction was longer than its ttl, so the row is anybody's now.
        assert!(matches!(lease.check(), Err(Error::LeaseLost { reason: Reason::Deadline, .. })));
        let token: i64 = admin.query_one(&claim, &[]).await.unwrap().get(0);
        let lease = keep(token, None).acquire().await.unwrap();
        lease.guard(&mut client).await.unwrap().commit_and_release().await.unwrap();
        assert!(matches!(lease.check(), Err(Error::LeaseLost { reason: Reason::Released, .. })));
        let free = format!("SELECT held_until IS NULL FROM {mode}");
        assert!(admin.query_one(&free, &[]).await.unwrap().get::<_, bool>(0));
        assert!(matches!(keep(token, None).acquire().await, Err(Error::LeaseLost { .. })));
        assert!(matches!(keep(token, None).shared().acquire().await, Err(Error::Invalid(_))));
        fence.close().await;
    }
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
}
