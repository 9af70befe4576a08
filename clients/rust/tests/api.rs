//! Tests of what only the client in Rust has: the shape of its API, its drivers and its types. The
//! vectors test what a client decides, and the scenarios of all clients test what a process shows.
//!
//! They run as `DATABASE_URL=postgresql://… cargo test`, with a database that has only the
//! extension.

use pg_fence_client::{
    BoxError, Connected, Error, Event, EventKind, Fence, Lease, Reason, classify, connect, open,
};
use std::fmt::{Debug, Display};
use std::future::{pending, poll_fn};
use std::panic::resume_unwind;
use std::pin::pin;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_postgres::config::SslMode;
use tokio_postgres::{Client, Config, NoTls, SimpleQueryMessage};
use tokio_util::sync::CancellationToken;

const LONG: Duration = Duration::from_secs(300);
const SHORT: Duration = Duration::from_secs(1);
const HANG: &str = "SELECT pg_sleep(300)";
const PAY: &str = "UPDATE orders SET status = 'paid'";
const STATUS: &str = "SELECT status FROM orders";
const STATE: &str = "SELECT state FROM lease_info('order:7')";

fn url() -> String {
    std::env::var("DATABASE_URL").expect("DATABASE_URL is set")
}

fn config(change: impl FnOnce(&mut Config) -> &mut Config) -> Config {
    let mut config: Config = url().parse().unwrap();
    change(&mut config).clone()
}

async fn client() -> Connected {
    connect(&url(), NoTls).await.unwrap()
}

/// The driver's connection, which a loss does not cut.
async fn uncut_client() -> Client {
    let (client, connection) = tokio_postgres::connect(&url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn busy_client(work: &str) -> Connected {
    let client = client().await;
    let _ = client.batch_execute(work).await;
    client
}

fn lost<T: Debug>(outcome: Result<T, Error>) -> Reason {
    match outcome {
        Err(Error::LeaseLost { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

/// Returns `in_doubt` of a transaction that is lost.
fn in_doubt<T>(outcome: Result<T, Error>) -> bool {
    match outcome.map(drop) {
        Err(Error::TransactionLost { in_doubt, .. }) => in_doubt,
        other => panic!("{other:?}"),
    }
}

/// A table of one order, bound to its lease. One test at a time has a shop, because a new epoch
/// invalidates the tokens of all leases in the database.
struct Shop {
    admin: Connected,
    fence: Fence,
    _lock: tokio::sync::MutexGuard<'static, ()>,
}

impl Shop {
    async fn new() -> Shop {
        static LOCK: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
        let (_lock, admin) = (LOCK.lock().await, client().await);
        let shop = Shop { admin, fence: Fence::new(&url()).unwrap(), _lock };
        let table = "DROP TABLE IF EXISTS orders; CREATE TABLE orders (id bigint, status text);
            INSERT INTO orders VALUES (7, 'new'); SELECT lease_revoke('order:7');
            SELECT fence_protect('orders', lease => 'order:7')";
        shop.sql(table).await;
        shop
    }

    /// Runs statements, and returns the first value of the last row.
    async fn sql(&self, statements: &str) -> String {
        let messages = self.admin.simple_query(statements).await.unwrap();
        let mut rows = messages.iter().rev().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        });
        rows.next().unwrap_or_default().to_owned()
    }

    async fn lease(&self) -> Lease {
        self.fence.lease("order:7").ttl(SHORT * 2).wait(LONG).acquire().await.unwrap()
    }

    /// Acquires a lease that is lost after `SHORT`.
    async fn lost_soon(&self) -> Lease {
        let request = self.fence.lease("order:7").at_most(SHORT).wait(LONG);
        request.acquire().await.unwrap()
    }
}

/// The release of the first guard is given up while it waits for a lock, and releases nothing.
#[tokio::test]
async fn a_lease_is_held_until_its_last_clone_is_dropped() {
    let (shop, mut client) = (Shop::new().await, client().await);
    let lease = shop.lease().await;
    shop.sql(&format!("BEGIN; SELECT lease_renew('order:7', {})", lease.token())).await;
    let guard = lease.guard(&mut client).await.unwrap();
    assert!(timeout(SHORT / 5, guard.commit_and_release()).await.is_err());
    shop.sql("COMMIT").await;
    sleep(SHORT * 3).await;
    let (clone, guard) = (lease.clone(), lease.guard(&mut client).await.unwrap());
    drop((lease, clone));
    // The fence sends one call after the other, so a release would have ended by now.
    shop.fence.lease("order:8").acquire().await.unwrap().release().await.unwrap();
    assert_eq!(shop.sql(STATE).await, "held");
    guard.execute(PAY, &[]).await.unwrap();
    guard.commit().await.unwrap();
    // The lease is released in the background after the guard, and by `hold` after its work.
    let request = shop.fence.lease("order:7").at_most(SHORT).wait(LONG);
    let mut ended = None;
    let hangs = request.hold(async |lease| {
        ended = Some(lease);
        pending::<Result<(), Error>>().await
    });
    assert_eq!(lost(hangs.await), Reason::AtMost);
    // No work begins without the lease.
    let begins = async { panic!("it began") };
    assert_eq!(lost(ended.unwrap().run::<()>(begins).await), Reason::AtMost);
    shop.fence.close().await;
    assert_eq!(shop.sql(STATE).await, "free");
}

/// Also if the answer to the release has come, but the program has blocked its thread until the loss.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_committed_after_a_loss() {
    let (shop, mut client) = (Shop::new().await, uncut_client().await);
    let lease = shop.lost_soon().await;
    let guard = lease.guard(&mut client).await.unwrap();
    guard.execute(PAY, &[]).await.unwrap();
    let mut ends = pin!(guard.commit_and_release());
    // Polled once, it has sent the release.
    assert!(poll_fn(|cx| Poll::Ready(ends.as_mut().poll(cx))).await.is_pending());
    std::thread::sleep(SHORT * 2);
    let error = ends.await.unwrap_err();
    assert!(matches!(error, Error::LeaseLost { in_doubt: false, .. }), "{error:?}");
    assert_eq!(shop.sql(STATUS).await, "new");
}

/// Also, the futures of the verbs can be spawned, and a lease stays held if the program's
/// transaction rolls back its release.
#[tokio::test]
async fn a_guard_in_an_open_transaction_is_a_savepoint() {
    let shop = Shop::new().await;
    let (lease, fence) = (shop.lease().await, shop.fence.clone());
    let work = async move {
        let mut client = client().await;
        let mut outer = client.transaction().await?;
        lease.guard(&mut outer).await?.commit_and_release().await?;
        outer.rollback().await?;
        sleep(SHORT * 3).await;
        lease.check()?;
        // A guard that has ignored an error undoes its own part.
        let mut outer = client.transaction().await?;
        let guard = lease.guard(&mut outer).await?;
        guard.batch_execute("SELECT 1 / 0").await.unwrap_err();
        assert!(!in_doubt(guard.commit().await));
        outer.batch_execute("SELECT 1").await?;
        drop(outer);
        let mut guard = lease.guard(&mut client).await?;
        lease.guard(&mut guard).await?.commit().await?;
        guard.execute(PAY, &[]).await?;
        guard.commit().await?;
        assert!(matches!(fence.guard(&mut client, []).await, Err(Error::Invalid(_))));
        let other = Fence::new(&url())?;
        assert!(matches!(other.guard(&mut client, [&lease]).await, Err(Error::Invalid(_))));
        lease.run(async { lease.release().await }).await?
    };
    tokio::spawn(work).await.unwrap().unwrap();
    assert_eq!(shop.sql(STATUS).await, "paid");
}

/// A deferred trigger fails in the commit with the code that the check of the transaction has.
#[tokio::test]
async fn an_error_of_the_commit_is_the_works_own() {
    let (shop, mut client) = (Shop::new().await, client().await);
    shop.sql(
        "CREATE OR REPLACE FUNCTION late() RETURNS trigger LANGUAGE plpgsql
            AS 'BEGIN RAISE SQLSTATE ''22012''; END';
        CREATE CONSTRAINT TRIGGER late AFTER UPDATE ON orders
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION late()",
    )
    .await;
    let lease = shop.lease().await;
    let guard = lease.guard(&mut client).await.unwrap();
    guard.execute(PAY, &[]).await.unwrap();
    let error = guard.commit().await.unwrap_err();
    assert!(matches!(error, Error::Other(_)), "{error:?}");
    assert_eq!(shop.sql(STATUS).await, "new");
    client.batch_execute("SELECT 1").await.unwrap();
    // Within a transaction of the program, which the work ends, and in one that it ends itself.
    let mut outer = client.transaction().await.unwrap();
    let guard = lease.guard(&mut outer).await.unwrap();
    guard.batch_execute("COMMIT").await.unwrap();
    assert!(in_doubt(guard.commit().await));
    drop(outer);
    let guard = lease.guard(&mut client).await.unwrap();
    guard.batch_execute("COMMIT; BEGIN; CREATE TABLE unguarded ()").await.unwrap();
    assert!(in_doubt(guard.commit().await));
    assert_eq!(shop.sql("SELECT count(*) FROM pg_class WHERE relname = 'unguarded'").await, "0");
    // In a session that presents the token in all its transactions.
    client.batch_execute(&format!("SET pg_fence.token = {}", lease.token())).await.unwrap();
    let guard = lease.guard(&mut client).await.unwrap();
    guard.batch_execute("ROLLBACK").await.unwrap();
    assert!(in_doubt(guard.commit().await));
    let guard = lease.guard(&mut client).await.unwrap();
    guard.batch_execute("ROLLBACK; BEGIN").await.unwrap();
    assert!(in_doubt(guard.commit_and_release().await));
    let lease = shop.lease().await;
    // A connection that a statement has opened in the server, and the guard's own.
    let guard = lease.guard(&mut client).await.unwrap();
    let dblink = guard.batch_execute("DO $$ BEGIN RAISE SQLSTATE '08001'; END $$").await;
    assert!(matches!(dblink, Err(Error::Other(_))), "{dblink:?}");
    assert!(!in_doubt(guard.commit_and_release().await));
    let guard = lease.guard(&mut client).await.unwrap();
    let ended = guard.batch_execute("SELECT pg_terminate_backend(pg_backend_pid())").await;
    assert!(!in_doubt(ended));
    while !guard.client().is_closed() {
        sleep(SHORT / 100).await;
    }
    assert!(!in_doubt(guard.commit().await));
    assert!(!in_doubt(lease.guard(&mut client).await));
}

/// Returns a connection through a proxy that gives the server's errors this severity.
async fn client_with(severity: &'static [u8; 5]) -> Connected {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, proxy) = (config(|config| config).get_ports()[0], listener.local_addr().unwrap());
    let through = url().replace(&format!(":{port}"), &format!(":{}", proxy.port()));
    tokio::spawn(async move {
        let (client, _) = listener.accept().await.unwrap();
        let server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let (mut requests, mut to_client) = client.into_split();
        let (mut answers, mut to_server) = server.into_split();
        tokio::spawn(async move { copy(&mut requests, &mut to_server).await });
        let mut bytes = [0; 8192];
        while let Ok(length @ 1..) = answers.read(&mut bytes).await {
            while let Some(at) = bytes.windows(7).position(|window| window == b"ERROR\0V") {
                bytes[at..at + 5].copy_from_slice(severity);
                bytes[at + 7..at + 12].copy_from_slice(severity);
            }
            to_client.write_all(&bytes[..length]).await.unwrap();
        }
    });
    connect(&through, NoTls).await.unwrap()
}

/// Whatever its SQLSTATE: poolers have some of their own.
#[tokio::test]
async fn a_fatal_error_of_the_commit_is_in_doubt() {
    let (shop, conflicts) = (Shop::new().await, "INSERT INTO twice VALUES (1), (1)");
    let lease = shop.lease().await;
    for severity in [b"FATAL", b"PANIC"] {
        let mut client = client_with(severity).await;
        let table = "CREATE TEMP TABLE twice (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)";
        client.batch_execute(table).await.unwrap();
        let guard = lease.guard(&mut client).await.unwrap();
        guard.batch_execute(conflicts).await.unwrap();
        let error = guard.commit().await.unwrap_err();
        assert!(matches!(error, Error::TransactionLost { in_doubt: true, .. }), "{error:?}");
    }
}

#[tokio::test]
async fn an_error_says_what_another_role_lacks() {
    let (shop, other) = (Shop::new().await, config(|config| config.user("rust_1")));
    shop.sql("CREATE ROLE \"Rust's 2\" LOGIN").await;
    let me = Fence::at([config(|config| config.user("Rust's 2"))], NoTls);
    let message = me.lease("job").acquire().await.unwrap_err().to_string();
    assert!(message.ends_with("SELECT fence_grant('\"Rust''s 2\"'))"), "{message}");
    let role = "CREATE ROLE rust_1 LOGIN; SELECT fence_grant('rust_1'); DROP TABLE IF EXISTS runs;
        CREATE TABLE runs (id int); SELECT fence_protect('runs', deadline => 'held_until')";
    shop.sql(role).await;
    let mut client = open(std::slice::from_ref(&other), NoTls, LONG).await.unwrap();
    let message = shop.lease().await.guard(&mut client).await.err().unwrap().to_string();
    assert!(message.contains("act as one role (options=-c role="), "{message}");
    let (fence, key) = (Fence::at([other], NoTls), [("id", &7 as &(dyn Display + Sync))]);
    let message = fence.keep_row("runs", &key, 1, SHORT).acquire().await.unwrap_err().to_string();
    assert!(
        message.ends_with("need SELECT and UPDATE: permission denied for table runs"),
        "{message}"
    );
    fence.close().await;
    drop(client);
    shop.sql("SELECT fence_revoke('rust_1'); DROP ROLE rust_1, \"Rust's 2\"").await;
}

static CHECKED_LEASE: OnceLock<Lease> = OnceLock::new();

/// A logger that checks a lease, and panics once it is lost.
struct CheckingLogger;

impl log::Log for CheckingLogger {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }
    fn log(&self, record: &log::Record) {
        // sqlx logs slow statements.
        let is_ours = record.target().starts_with("pg_fence");
        if is_ours && CHECKED_LEASE.get().is_some_and(|lease| lease.check().is_err()) {
            resume_unwind(Box::new("as a log that writes to a closed pipe"));
        }
    }
    fn flush(&self) {}
}

#[tokio::test]
async fn a_logger_may_check_a_lease_and_panic() {
    let shop = Shop::new().await;
    let lease = shop.lost_soon().await;
    let lease = CHECKED_LEASE.get_or_init(|| lease);
    log::set_logger(&CheckingLogger).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    assert_eq!(lost(lease.run(pending::<()>()).await), Reason::AtMost);
    assert_eq!(lost(lease.check()), Reason::AtMost);
    // The replies to other acquires are delivered after that line of the log.
    let reply = timeout(LONG / 30, shop.fence.lease("order:8").acquire()).await;
    reply.expect("a reply").unwrap();
    // So is the line of a leader that begins again.
    static HAS_LED: AtomicBool = AtomicBool::new(false);
    let stop = CancellationToken::new();
    let lead = shop.fence.lead("order:9", SHORT, &stop, async |_| {
        if !HAS_LED.swap(true, Relaxed) {
            lease.check()?;
        }
        Ok::<_, BoxError>(())
    });
    timeout(LONG / 30, lead).await.expect("a second term").unwrap();
}

/// A statement that the program gives up ends, too, and its connection can be used again.
#[tokio::test]
async fn a_loss_ends_the_statement_that_hangs() {
    let (shop, mut client) = (Shop::new().await, uncut_client().await);
    let lease = shop.lost_soon().await;
    let guard = lease.guard(&mut client).await.unwrap();
    assert_eq!(lost(guard.batch_execute(HANG).await), Reason::AtMost);
    drop((guard, lease));
    let lease = shop.lease().await;
    let guard = lease.guard(&mut client).await.unwrap();
    // It also ends if another statement of the guard, which was sent with it, has ended.
    let both = async { tokio::join!(guard.batch_execute("SELECT 1"), guard.batch_execute(HANG)) };
    assert!(timeout(SHORT / 5, both).await.is_err());
    drop((guard, lease));
    // A statement after the savepoint is not cancelled: the program's transaction goes on.
    let lease = timeout(LONG / 30, shop.lost_soon()).await.expect("no statement hangs");
    let mut outer = client.transaction().await.unwrap();
    let guard = lease.guard(&mut outer).await.unwrap();
    lease.lost().await;
    drop((guard, lease));
    outer.batch_execute("SELECT pg_sleep(1)").await.unwrap();
    outer.rollback().await.unwrap();
    // A guard that has not begun ends with its connection, as its BEGIN waits for a statement.
    let mut client = self::client().await;
    assert!(timeout(SHORT / 5, client.batch_execute(HANG)).await.is_err());
    let lease = shop.lost_soon().await;
    assert_eq!(lost(lease.guard(&mut client).await.map(drop)), Reason::AtMost);
    client.batch_execute("SELECT 1").await.unwrap_err();
}

#[tokio::test]
async fn nested_errors_are_found_and_permanent_ones_come_at_once() {
    let shop = Shop::new().await;
    let refused = shop.admin.batch_execute(PAY).await.unwrap_err();
    let wrapped: BoxError = Box::new(Error::other(refused));
    let Some(Error::Refused(refused)) = classify(&Error::other(wrapped)) else { panic!() };
    assert!(refused.sqlstate == "PF002" && refused.detail["relation"] == "public.orders");
    let other = shop.admin.batch_execute("SELECT 1 / 0").await.unwrap_err();
    assert!(classify(&other).is_none());
    let elsewhere = Fence::new(&url()).unwrap().in_schema("nowhere");
    assert!(matches!(elsewhere.lease("x").acquire().await, Err(Error::NotInstalled(_))));
    // The error of a connection that can never be opened comes at once.
    for (words, fence) in [
        ("TLS", Fence::at([config(|config| config.ssl_mode(SslMode::Require))], NoTls)),
        ("does not exist", Fence::at([config(|config| config.dbname("nowhere"))], NoTls)),
        ("no host, as user", Fence::new("dbname=shop").unwrap()),
        ("no secret", Fence::with_opener(|| async { Err(Error::other("no secret")) })),
        ("in a transaction", Fence::with_opener(async || Ok(busy_client("BEGIN").await))),
        (
            "in a transaction",
            Fence::with_opener(async || Ok(busy_client("BEGIN; SELECT 1 / 0").await)),
        ),
    ] {
        let stop = CancellationToken::new();
        let lead = fence.lead("x", SHORT, &stop, async |_| Ok(()));
        let error = timeout(SHORT * 5, lead).await.expect("at once").unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// A callback may block and panic, and the program may block its runtime: the heartbeat has a
/// separate thread.
#[tokio::test(flavor = "current_thread")]
async fn a_program_that_blocks_and_panics_keeps_its_lease() {
    let shop = Shop::new().await;
    // A panic without a trace, which would take its time from the heartbeat.
    let panics = |event: &Event| {
        if event.kind == EventKind::Renewed {
            std::thread::sleep(SHORT * 3);
        }
        resume_unwind(Box::new("which takes nothing from the lease"))
    };
    let fence = shop.fence.clone().on_event(panics);
    let lease = fence.lease("order:7").ttl(SHORT * 2).acquire().await.unwrap();
    std::thread::sleep(SHORT * 3);
    lease.check().unwrap();
    lease.release().await.unwrap();
    fence.close().await;
}

#[cfg(feature = "blocking")]
#[tokio::test]
async fn an_acquire_in_a_callback_is_refused() {
    use pg_fence_client::blocking;
    use std::sync::{Arc, mpsc};
    let shop = Shop::new().await;
    let same: Arc<OnceLock<Fence>> = Arc::default();
    let (errors, error) = mpsc::channel();
    let in_event = same.clone();
    let fence = shop.fence.clone().on_event(move |_| {
        let fence = in_event.get().unwrap().clone();
        let request = fence.lease("order:8");
        let acquired = blocking::Fence::of(fence).unwrap().wait(request.acquire());
        errors.send(acquired.err()).unwrap();
    });
    same.set(fence.clone()).unwrap();
    let lease = timeout(LONG / 30, fence.lease("order:7").acquire()).await.expect("a reply");
    assert!(matches!(error.recv().unwrap(), Some(Error::Invalid(_))));
    lease.unwrap().release().await.unwrap();
    fence.close().await;
}

/// The event of the grant hangs, and the reply comes after it.
#[tokio::test]
async fn a_grant_that_is_given_up_while_a_callback_hangs_is_released() {
    let shop = Shop::new().await;
    let (ends, hangs) = std::sync::mpsc::channel::<()>();
    let hangs = std::sync::Mutex::new(hangs);
    let fence = shop.fence.clone().on_event(move |_| {
        let _ = hangs.lock().unwrap().recv();
    });
    assert!(timeout(SHORT, fence.lease("order:7").ttl(LONG).acquire()).await.is_err());
    sleep(SHORT).await;
    assert_eq!(shop.sql(STATE).await, "free");
    drop(ends);
}

#[tokio::test]
async fn a_loss_comes_at_the_deadline_while_the_opener_blocks() {
    let (shop, opened) = (Shop::new().await, AtomicBool::new(false));
    let fence = Fence::with_opener(move || {
        if opened.swap(true, Relaxed) {
            std::thread::sleep(SHORT * 8);
        }
        async { Ok(client().await) }
    });
    let lease = fence.lease("order:7").ttl(SHORT * 2).acquire().await.unwrap();
    shop.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
    .await;
    let loss = timeout(SHORT * 5, lease.lost()).await.expect("by the deadline");
    assert_eq!(lost(loss.map_or(Ok(()), Err)), Reason::Deadline);
}

/// The leader does not try again, and reports no outage.
#[tokio::test]
async fn a_leader_ends_with_its_fence() {
    let shop = Shop::new().await;
    let fence = shop.fence.clone().on_event(|event| {
        INTERRUPTED.fetch_or(event.kind == EventKind::Interrupted, Relaxed);
    });
    static INTERRUPTED: AtomicBool = AtomicBool::new(false);
    let stop = CancellationToken::new();
    let led = fence.lead("order:7", SHORT, &stop, async |lease| {
        fence.close().await;
        lease.check()?;
        Ok::<_, BoxError>(())
    });
    timeout(LONG / 30, led).await.expect("at once").unwrap_err();
    fence.close().await;
    assert!(!INTERRUPTED.load(Relaxed));
}

/// A lease that the work has released is not lost.
#[tokio::test]
async fn a_leader_whose_work_releases_and_fails_ends() {
    let (shop, stop) = (Shop::new().await, CancellationToken::new());
    let led = shop.fence.lead("order:7", SHORT, &stop, async |lease| {
        lease.release().await?;
        Err::<(), BoxError>("failed".into())
    });
    let error = timeout(LONG / 30, led).await.expect("at once").unwrap_err();
    assert_eq!(error.to_string(), "failed");
}

/// The work may watch the lease itself, and return at a loss.
#[tokio::test]
async fn a_leader_whose_work_returns_at_a_loss_leads_again() {
    let (shop, stop) = (Shop::new().await, CancellationToken::new());
    let terms = AtomicUsize::new(0);
    let led = shop.fence.lead("order:7", SHORT, &stop, async |lease| {
        let term = terms.fetch_add(1, Relaxed) + 1;
        if term == 1 {
            shop.sql("SELECT lease_revoke('order:7')").await;
            // This blocks the runtime, so the loss does not drop the work before it returns.
            while lease.check().is_ok() {
                std::thread::sleep(SHORT / 20);
            }
        }
        Ok::<_, BoxError>(term)
    });
    assert_eq!(timeout(LONG / 30, led).await.expect("a second term").unwrap(), Some(2));
}

/// In both modes, with a key of two columns, and with columns of any name.
#[tokio::test]
async fn a_row_is_a_lease() {
    for (mode, fence) in [("monotonic", "fence"), ("managed", "Token")] {
        let (shop, mut client) = (Shop::new().await, client().await);
        let table = format!(
            "DROP TABLE IF EXISTS runs; CREATE TABLE runs (part text, id int, state text,
                PRIMARY KEY (id, part)); INSERT INTO runs VALUES ('a', 1, 'ready');
            SELECT fence_protect('runs', '{fence}', '{mode}', deadline => 'held_until')"
        );
        shop.sql(&table).await;
        let claim = format!(
            "UPDATE runs SET held_until = clock_timestamp() + '2 s', state = 'running'
            WHERE held_until IS NULL OR held_until < clock_timestamp() RETURNING \"{fence}\""
        );
        let keep = |table: &str, id: &str, token: &str| {
            let key: [(&str, &(dyn Display + Sync)); 2] = [("id", &id), ("part", &"a")];
            let row = shop.fence.keep_row(table, &key, token.parse().unwrap(), SHORT * 2);
            row.columns(fence, "held_until").acquire()
        };
        let row = keep("runs", "1", &shop.sql(&claim).await).await.unwrap();
        assert_eq!(row.names(), ["runs", r#"["1","a"]"#]);
        // The row is renewed, and it is not lost while its own transaction has locked it.
        sleep(SHORT * 3).await;
        // After a new epoch the server refuses the token of the name until both leases are renewed.
        // The row is renewed only after the guard that was refused has unlocked it.
        let name = shop.fence.lease("order:7").acquire().await.unwrap();
        shop.sql("SELECT fence_new_epoch()").await;
        let guard = shop.fence.guard(&mut client, [&name, &row]).await.unwrap();
        guard.execute("UPDATE runs SET state = 'half'", &[]).await.unwrap();
        sleep(SHORT * 3).await;
        // The transaction took longer than the ttl. It may commit, but its session could have ended.
        assert_eq!(lost(row.check()), Reason::Deadline);
        guard.commit().await.unwrap();
        // Anybody can claim the row now.
        assert_eq!(lost(row.check()), Reason::Deadline);
        let token = shop.sql(&claim).await;
        let row = keep("runs", "1", &token).await.unwrap();
        row.guard(&mut client).await.unwrap().commit_and_release().await.unwrap();
        assert_eq!(lost(row.check()), Reason::Released);
        assert_eq!(lost(keep("runs", "1", &token).await), Reason::Gone);
        keep("runs", "1", &shop.sql(&claim).await).await.unwrap().release().await.unwrap();
        assert_eq!(shop.sql("SELECT held_until IS NULL FROM runs").await, "t");
        // The error of a row that cannot be kept says why.
        for (table, id, state) in [("runs", "x", "22P02"), ("no.runs", "1", "3F000")] {
            let wrong = keep(table, id, &token).await.unwrap_err();
            assert_eq!(wrong.sqlstate().as_deref(), Some(state));
        }
    }
}

/// The guard's own statement waits for a row that another transaction has locked.
#[tokio::test]
async fn a_loss_ends_a_guard_that_waits_for_a_lock() {
    let (shop, mut client) = (Shop::new().await, uncut_client().await);
    let table = "DROP TABLE IF EXISTS runs; CREATE TABLE runs (id int PRIMARY KEY);
        INSERT INTO runs VALUES (1); SELECT fence_protect('runs', deadline => 'held_until');
        UPDATE runs SET held_until = clock_timestamp() + '5 min' RETURNING fence";
    let token = shop.sql(table).await.parse().unwrap();
    let row = shop.fence.keep_row("runs", &[("id", &1)], token, LONG).at_most(SHORT);
    let row = row.acquire().await.unwrap();
    let _locks = busy_client("BEGIN; SELECT FROM runs FOR UPDATE").await;
    assert_eq!(lost(row.guard(&mut client).await.map(drop)), Reason::AtMost);
    timeout(LONG / 30, client.batch_execute("SELECT 1"))
        .await
        .expect("no statement hangs")
        .unwrap();
}

/// A row is released at the end of the work, and by a guard.
#[tokio::test]
async fn a_fence_that_names_its_schema_releases_rows() {
    let (shop, mut client) = (Shop::new().await, client().await);
    let table = "DROP TABLE IF EXISTS runs; CREATE TABLE runs (id int PRIMARY KEY);
        INSERT INTO runs VALUES (1); SELECT fence_protect('runs', deadline => 'held_until')";
    shop.sql(table).await;
    let fence = shop.fence.clone().in_schema("public");
    let claim = "UPDATE runs SET held_until = clock_timestamp() + '5 min' RETURNING fence";
    let keep = |token: String| fence.keep_row("runs", &[("id", &1)], token.parse().unwrap(), LONG);
    let is_released = "SELECT held_until IS NULL FROM runs";
    let held = keep(shop.sql(claim).await).hold(async |_| Ok::<_, Error>(())).await;
    assert_eq!((held.is_ok(), &*shop.sql(is_released).await), (true, "t"));
    let row = keep(shop.sql(claim).await).acquire().await.unwrap();
    row.guard(&mut client).await.unwrap().commit_and_release().await.unwrap();
    assert_eq!(shop.sql(is_released).await, "t");
}

#[cfg(feature = "blocking")]
#[test]
fn a_program_without_async_waits_for_the_verbs() {
    let fence = pg_fence_client::blocking::Fence::new(&url()).unwrap();
    let shop = fence.wait(Shop::new());
    // The work of `lead` may wait, too, and after a stop `lead` waits for the work.
    let stop = CancellationToken::new();
    let led = fence.wait(fence.lead("order:7", LONG, &stop, async |lease: Lease| {
        stop.cancel();
        let mut client = fence.wait(client());
        let guard = fence.wait(lease.guard(&mut client))?;
        fence.wait(guard.execute(PAY, &[]))?;
        fence.wait(guard.commit())?;
        Ok(lease.token())
    }));
    assert_eq!((led.unwrap().is_some(), &*fence.wait(shop.sql(STATUS))), (true, "paid"));
    fence.wait(fence.close());
}

#[cfg(feature = "sqlx")]
mod of_sqlx {
    use super::*;
    use pg_fence_client::Guardable;
    use sqlx::postgres::{PgConnection, PgPoolOptions};
    use sqlx::{Connection, Executor};

    /// For any connection: the names of the trait's methods are not those of the drivers' own.
    async fn can_guard(lease: &Lease, connection: &mut impl Guardable) -> bool {
        lease.guard(connection).await.is_ok()
    }

    #[tokio::test]
    async fn a_transaction_that_has_failed_stays_as_it_is() {
        let (shop, mut connection) =
            (Shop::new().await, PgConnection::connect(&url()).await.unwrap());
        let lease = shop.lease().await;
        let mut outer = connection.begin().await.unwrap();
        outer.execute("SELECT 1 / 0").await.unwrap_err();
        assert!(!can_guard(&lease, &mut *outer).await);
        outer.execute("CREATE TABLE unguarded ()").await.unwrap_err();
    }

    #[tokio::test]
    async fn a_pool_of_one_connection_gets_it_back() {
        let shop = Shop::new().await;
        let pool = PgPoolOptions::new().max_connections(1).connect(&url()).await.unwrap();
        let lease = shop.lease().await;
        let refused = Error::from(pool.execute(PAY).await.unwrap_err());
        assert!(matches!(refused, Error::Refused(refused) if refused.sqlstate == "PF002"));
        for work in
            ["SELECT 1", "SELECT 1 / 0", "COMMIT", "SELECT pg_terminate_backend(pg_backend_pid())"]
        {
            let mut connection = pool.acquire().await.unwrap();
            let mut guard = lease.guard(&mut *connection).await.unwrap();
            let _ = guard.execute(work).await;
            assert_eq!(guard.commit().await.is_ok(), work == "SELECT 1", "{work}");
        }
        // After a new epoch the server refuses the token until it is renewed. Also, the future of a
        // guard can be spawned.
        shop.sql("SELECT fence_new_epoch()").await;
        let mut connection = pool.acquire().await.unwrap();
        let work = async move {
            let mut guard = lease.guard(&mut *connection).await?;
            lease.run(guard.execute(PAY)).await??;
            let mut inner = lease.guard(&mut **guard).await?;
            inner.execute("UPDATE orders SET status = 'undone'").await?;
            drop(inner);
            guard.commit_and_release().await?;
            Ok::<_, Error>(lease.check())
        };
        assert_eq!(lost(tokio::spawn(work).await.unwrap().unwrap()), Reason::Released);
        assert_eq!(shop.sql(STATUS).await, "paid");
        let (lease, mut connection) = (shop.lost_soon().await, pool.acquire().await.unwrap());
        let mut guard = lease.guard(&mut *connection).await.unwrap();
        assert_eq!(lost(lease.run(guard.execute(HANG)).await), Reason::AtMost);
        drop(guard);
        drop(connection);
        pool.acquire().await.unwrap().execute("SELECT 1").await.unwrap();
    }
}
