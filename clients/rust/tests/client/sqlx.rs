//! On connections of sqlx.

use super::*;
use ::sqlx::postgres::{PgConnectOptions, PgConnection, PgPoolOptions};
use ::sqlx::{Connection, Executor};
use std::str::FromStr;

async fn connection() -> PgConnection {
    PgConnection::connect(&url()).await.unwrap()
}

#[tokio::test]
async fn a_transaction_of_sqlx_is_guarded() {
    let shop = Shop::new("sqlx_guarded").await;
    let lease = shop.lease().await;
    let mut connection = connection().await;
    let mut guarded = lease.guard_sqlx(&mut connection).await.unwrap();
    ::sqlx::query(&shop.set("paid")).execute(&mut *guarded).await.unwrap();
    assert_eq!(shop.guards().await, 1);
    guarded.commit().await.unwrap();
    assert_eq!(shop.status().await, "paid");
    let mut presented = lease.present_sqlx(&mut connection).await.unwrap();
    presented.run(async |on| on.execute(shop.set("presented").as_str()).await).await.unwrap();
    presented.commit().await.unwrap();
    assert_eq!(shop.status().await, "presented");
    let mut undone = lease.guard_sqlx(&mut connection).await.unwrap();
    undone.execute(shop.set("undone").as_str()).await.unwrap();
    drop(undone);
    let mut outer = connection.begin().await.unwrap();
    let mut inner = lease.guard_sqlx(&mut outer).await.unwrap();
    inner.execute(shop.set("inner").as_str()).await.unwrap();
    inner.commit().await.unwrap();
    assert_eq!(shop.status().await, "presented");
    outer.commit().await.unwrap();
    assert_eq!(shop.status().await, "inner");
    let mut last = lease.guard_sqlx(&mut connection).await.unwrap();
    last.execute(shop.set("last").as_str()).await.unwrap();
    last.commit_and_release().await.unwrap();
    assert!(!shop.is_held(&shop.order()).await);
    assert_eq!(shop.status().await, "last");
}

#[tokio::test]
async fn errors_of_sqlx_have_types() {
    let shop = Shop::new("sqlx_typed").await;
    let other = shop.fence.lease("sqlx_typed:8").ttl(LONG).acquire().await.unwrap();
    let mut connection = connection().await;
    let unfenced = connection.execute(shop.set("late").as_str()).await.unwrap_err();
    assert!(matches!(classify(&unfenced), Some(Error::NoToken(_))), "{unfenced:?}");
    let mut presented = other.present_sqlx(&mut connection).await.unwrap();
    let late = presented.run(async |on| on.execute(shop.set("late").as_str()).await).await;
    let Err(Error::NotSpeaking(refusal)) = &late else { panic!("{late:?}") };
    assert_eq!(refusal.detail()["lease"], "sqlx_typed:7");
    assert!(refusal.hint().is_some() && refusal.message().contains("sqlx_typed:7"));
    drop(presented);
    let mut guarded = other.guard_sqlx(&mut connection).await.unwrap();
    let divided = guarded.execute("SELECT 1/0").await.unwrap_err();
    let error = Error::from(divided);
    assert!(matches!(error, Error::Sqlx(_)) && error.sqlstate() == Some("22012"), "{error:?}");
    // sqlx's own commit takes the ROLLBACK for an answer.
    assert_eq!(guarded.commit().await.unwrap_err().sqlstate(), Some("25P02"));
    let mut guarded = other.guard_sqlx(&mut connection).await.unwrap();
    guarded.execute("ROLLBACK").await.unwrap();
    assert_eq!(guarded.commit().await.unwrap_err().sqlstate(), Some("25P01"));
    let mut guarded = other.guard_sqlx(&mut connection).await.unwrap();
    let (pid,): (i32,) =
        ::sqlx::query_as("SELECT pg_backend_pid()").fetch_one(&mut *guarded).await.unwrap();
    shop.admin.execute("SELECT pg_terminate_backend($1, 10000)", &[&pid]).await.unwrap();
    let error = guarded.commit().await.unwrap_err();
    assert!(matches!(error, Error::TransactionLost(_)), "{error:?}");
    other.release().await.unwrap();
}

#[tokio::test]
async fn a_loss_ends_what_runs_on_sqlx() {
    let shop = Shop::new("sqlx_lost").await;
    let lease = shop.fence.lease(shop.order()).ttl(Duration::from_secs(3)).acquire().await.unwrap();
    let mut connection = connection().await;
    let mut guarded = lease.guard_sqlx(&mut connection).await.unwrap();
    shop.revoke().await;
    let slept = guarded.run(async |on| on.execute("SELECT pg_sleep(10)").await);
    let slept = tokio::time::timeout(PATIENCE, slept).await.unwrap().unwrap_err();
    assert_eq!(lost_by(&slept), Reason::Gone);
    assert_eq!(lost_by(&guarded.commit().await.unwrap_err()), Reason::Gone);
    let refused = lease.guard_sqlx(&mut connection).await.map(drop);
    assert_eq!(lost_by(&refused.unwrap_err()), Reason::Gone);
}

#[tokio::test]
async fn a_pool_of_sqlx_presents_a_token_by_its_options() {
    let shop = Shop::new("sqlx_pool").await;
    let lease = shop.lease().await;
    let options = lease.options_sqlx(PgConnectOptions::from_str(&url()).unwrap());
    let pool = PgPoolOptions::new().max_connections(2).connect_with(options).await.unwrap();
    pool.execute(shop.set("paid").as_str()).await.unwrap();
    shop.revoke().await;
    let next = shop.lease().await;
    let late = pool.execute(shop.set("late").as_str()).await.unwrap_err();
    assert!(matches!(classify(&late), Some(Error::NotSpeaking(_))), "{late:?}");
    assert_eq!(shop.status().await, "paid");
    next.release().await.unwrap();
    pool.close().await;
}

#[tokio::test]
async fn a_number_of_somebody_else_s_guards_on_sqlx() {
    let shop = Shop::new("sqlx_adopted").await;
    let mut connection = connection().await;
    let adopted = shop.fence.adopt(shop.order(), 33).metadata(json!({ "run": 7 })).acquire().await;
    let adopted = adopted.unwrap();
    shop.forget().await;
    let mut guarded = adopted.guard_sqlx(&mut connection).await.unwrap();
    guarded.execute(shop.set("paid").as_str()).await.unwrap();
    guarded.commit_and_release().await.unwrap();
    assert_eq!(shop.row().await, "paid 33");
    shop.forget().await;
}
