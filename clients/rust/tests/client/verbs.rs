//! Hand-overs, claims, who leads, and how long.

use super::*;
use pg_fence_client::{guard_all, options};
use std::sync::{Arc, Mutex};
use tokio_postgres::Config;
use tokio_postgres::types::Type;

#[tokio::test]
async fn a_token_is_handed_over() {
    let shop = Shop::new("handed_over").await;
    let request = shop.fence.lease(shop.order()).ttl(LONG).session();
    let session = request.acquire().await.unwrap();
    assert!(session.clone().detach().is_err(), "it would end with its session");
    session.release().await.unwrap();
    let lease = shop.lease().await;
    let renewed = lease.renew().await.unwrap().unwrap();
    let also = lease.clone();
    let token = lease.detach().unwrap();
    assert_eq!(also.check().unwrap_err().reason(), Reason::Released);
    assert!(shop.is_held(&shop.order()).await);
    let other = Fence::new(&url()).unwrap();
    // A renewal's token would serve for some renewals only.
    let resumed = other.resume(shop.order(), renewed, LONG).await.unwrap();
    assert_eq!(resumed.token(), token);
    let mut client = client().await;
    shop.pay(resumed.guard(&mut client).await.unwrap()).await.unwrap();
    resumed.release().await.unwrap();
    let over = other.resume(shop.order(), token, LONG).await.unwrap_err();
    assert_eq!(lost_by(&over), Reason::Gone);
    let several = shop.fence.lease(["handed_over:1", "handed_over:2"]).acquire().await.unwrap();
    let token = several.detach().unwrap();
    let names = ["handed_over:2", "handed_over:1"];
    other.resume(names, token, LONG).await.unwrap().release().await.unwrap();
    assert!(!shop.is_held("handed_over:1").await);
}

#[tokio::test]
async fn the_first_free_rows_of_a_query_are_claimed() {
    let shop = Shop::new("claimed").await;
    let sql = "DROP TABLE IF EXISTS jobs; CREATE TABLE jobs (id int PRIMARY KEY, done boolean NOT NULL DEFAULT false);
               INSERT INTO jobs SELECT n, n % 2 = 0 FROM generate_series(1, 200) AS n; ANALYZE jobs";
    shop.admin.batch_execute(sql).await.unwrap();
    let held = shop.fence.lease("claimed:191").acquire().await.unwrap();
    let query =
        "SELECT 'claimed:' || id, id FROM jobs WHERE done = $1 AND id > $2 ORDER BY id DESC;";
    let claim = |limit| {
        let claim = shop.fence.claim(query, limit).ttl(LONG).holder("C").metadata(json!({}));
        claim.bind(false, Type::BOOL).bind(100, Type::INT4).acquire()
    };
    let ids = |claimed: &[pg_fence_client::Claimed]| -> Vec<i32> {
        claimed.iter().map(|claimed| claimed.row.get("id")).collect()
    };
    let first = claim(5).await.unwrap();
    assert_eq!(ids(&first), [199, 197, 195, 193, 189]);
    assert_eq!(first[0].lease.names(), ["claimed:199"]);
    assert_eq!(first[0].row.get::<_, &str>("claimed"), "claimed:199");
    let second = claim(100).await.unwrap();
    assert_eq!(second.len(), 50 - 6);
    assert!(claim(1).await.unwrap().is_empty());
    // No more is tried than is asked for.
    let sql = "SELECT count(*) FROM fence.leases WHERE name LIKE 'claimed:%' AND state = 'held'";
    assert_eq!(shop.value::<i64>(sql, &[]).await, 50);
    for claimed in first.into_iter().chain(second) {
        claimed.lease.check().unwrap();
        claimed.lease.release().await.unwrap();
    }
    held.release().await.unwrap();
    let bad = shop.fence.claim("SELECT 'x' FROM nowhere", 1).acquire().await.map(drop);
    assert_eq!(bad.unwrap_err().sqlstate(), Some("42P01"));
}

#[tokio::test]
async fn a_claim_that_nobody_waits_for_is_given_back() {
    let shop = Shop::new("unclaimed").await;
    let before = tasks();
    for micros in [0, 1000, 2000, 4000, 8000, 16000] {
        let query = "SELECT 'unclaimed:' || n FROM generate_series(1, 5) AS n";
        let claims = shop.fence.claim(query, 3).ttl(LONG).acquire();
        drop(tokio::time::timeout(Duration::from_micros(micros), claims).await);
    }
    wait_until("its tasks have ended", async || tasks() == before).await;
    for number in 1..=5 {
        assert!(!shop.is_held(&format!("unclaimed:{number}")).await);
    }
}

#[tokio::test]
async fn several_leases_are_guarded_at_once() {
    let shop = Shop::new("guarded_at_once").await;
    let lease = shop.lease().await;
    let several = shop.fence.lease(["guarded_at_once:8", "guarded_at_once:9"]).ttl(LONG);
    let several = several.acquire().await.unwrap();
    let mut client = client().await;
    assert!(guard_all([], &mut client).await.is_err());
    shop.pay(guard_all([&several, &lease], &mut client).await.unwrap()).await.unwrap();
    assert_eq!(shop.status().await, "paid");
    let guarded = guard_all([&several, &lease], &mut client).await.unwrap();
    guarded.execute(&shop.set("late"), &[]).await.unwrap();
    // The loss of one is the end of all.
    shop.admin.execute("SELECT lease_revoke('guarded_at_once:9')", &[]).await.unwrap();
    let _ = several.renew().await;
    assert_eq!(lost_by(&guarded.commit().await.unwrap_err()), Reason::Gone);
    assert_eq!(shop.status().await, "paid");
    shop.admin.execute("SELECT lease_revoke('guarded_at_once:8')", &[]).await.unwrap();
    let other = shop.fence.lease("guarded_at_once:10").ttl(LONG).acquire().await.unwrap();
    let mut fresh = self::client().await;
    guard_all([&other, &lease], &mut fresh).await.unwrap().commit_and_release().await.unwrap();
    assert!(!shop.is_held(&shop.order()).await && !shop.is_held("guarded_at_once:10").await);
    assert_eq!(lease.check().unwrap_err().reason(), Reason::Released);
}

#[tokio::test]
async fn code_that_knows_nothing_of_fences_is_fenced_by_its_connection() {
    let shop = Shop::new("by_options").await;
    let lease = shop.lease().await;
    let config: Config = url().parse().unwrap();
    let mut config = config.clone();
    config.options("-c statement_timeout=60000");
    let (unaware, connection) = lease.options(&config).connect(NoTls).await.unwrap();
    tokio::spawn(connection);
    unaware.batch_execute(&shop.set("paid")).await.unwrap();
    let timeout = unaware.query_one("SHOW statement_timeout", &[]).await.unwrap();
    assert_eq!(timeout.get::<_, &str>(0), "1min");
    assert_eq!(options(34), "-c pg_fence.token=34");
    shop.revoke().await;
    let next = shop.lease().await;
    let late = unaware.batch_execute(&shop.set("late")).await.unwrap_err();
    assert!(matches!(classify(&late), Some(Error::NotSpeaking(_))), "{late:?}");
    assert_eq!(shop.status().await, "paid");
    next.release().await.unwrap();
}

#[tokio::test]
async fn who_leads_is_told() {
    let shop = Shop::new("told").await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let told = seen.clone();
    let first = shop.fence.lease(shop.order()).holder("first").ttl(LONG).acquire().await.unwrap();
    let token = first.token();
    let request = shop.fence.lease(shop.order()).holder("second").ttl(LONG);
    let request = request.on_leader(move |leader| told.lock().unwrap().push(leader));
    let leads = tokio::spawn(
        request
            .lead_until(async { tokio::time::sleep(Duration::from_secs(4)).await }, async |_| {
                pending::<Result<(), Error>>().await
            }),
    );
    let saw = |count| {
        let seen = seen.clone();
        wait_until("it is told", async move || seen.lock().unwrap().len() >= count)
    };
    saw(1).await;
    first.release().await.unwrap();
    assert!(leads.await.unwrap().unwrap().is_none());
    let seen = seen.lock().unwrap().clone();
    assert_eq!((seen[0].holder.as_deref(), seen[0].token), (Some("first"), Some(token)));
    assert!(seen[0].since.is_some());
    assert_eq!(seen.last().unwrap().holder.as_deref(), Some("second"));
    assert!(!shop.is_held(&shop.order()).await);
}

#[tokio::test]
async fn leading_that_waits_can_be_stopped() {
    let shop = Shop::new("stopped_waiting").await;
    let lease = shop.lease().await;
    let before = tasks();
    let request = shop.fence.lease(shop.order()).ttl(LONG);
    let soon = tokio::time::sleep(Duration::from_millis(300));
    let led = request.lead_until(soon, async |_| Ok::<_, Error>(()));
    assert!(tokio::time::timeout(PATIENCE, led).await.unwrap().unwrap().is_none());
    wait_until("its tasks have ended", async || tasks() == before).await;
    lease.release().await.unwrap();
    assert!(!shop.is_held(&shop.order()).await);
}

#[tokio::test]
async fn a_last_write_leaves_it_taken_for_at_least_so_long() {
    let shop = Shop::new("at_least").await;
    let request = shop.fence.lease(shop.order()).ttl(LONG).hold_at_least(Duration::from_secs(3));
    assert!(request.clone().session().acquire().await.is_err());
    let lease = request.acquire().await.unwrap();
    let mut client = client().await;
    let guarded = lease.guard(&mut client).await.unwrap();
    guarded.execute(&shop.set("paid"), &[]).await.unwrap();
    guarded.commit_and_release().await.unwrap();
    assert!(shop.is_held(&shop.order()).await);
    lease.release().await.unwrap();
    let next = shop.fence.lease(shop.order()).wait(PATIENCE).acquire().await.unwrap();
    next.release().await.unwrap();
}
