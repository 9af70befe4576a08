//! What is easily done wrong, and is told.

use super::*;

#[tokio::test]
async fn a_ttl_that_is_too_short_is_refused_by_name() {
    let shop = Shop::new("too_short").await;
    for ttl in [Duration::ZERO, Duration::from_millis(99)] {
        let acquired = shop.fence.lease(shop.order()).ttl(ttl).acquire().await.map(drop);
        assert!(acquired.unwrap_err().to_string().starts_with("ttl: "));
        let resumed = shop.fence.resume(shop.order(), 1, ttl).await.map(drop);
        assert!(resumed.unwrap_err().to_string().starts_with("ttl: "));
        let claimed = shop.fence.claim("SELECT 'a'", 1).ttl(ttl).acquire().await.map(drop);
        assert!(claimed.unwrap_err().to_string().starts_with("ttl: "));
    }
}

#[tokio::test]
async fn an_extension_that_is_not_found_is_told() {
    let shop = Shop::new("not_found").await;
    let elsewhere = Fence::new(&format!("{}&options=-csearch_path%3Dpg_temp", url())).unwrap();
    for fence in [elsewhere.clone(), shop.fence.clone().in_schema("no\"where")] {
        for wait in [Duration::ZERO, LONG] {
            let error = fence.lease(shop.order()).wait(wait).acquire().await.unwrap_err();
            assert!(matches!(error, Error::NotInstalled(_)), "{error:?}");
            assert!(error.to_string().contains("in_schema"), "{error}");
        }
        let claimed = fence.claim("SELECT 'a'", 1).acquire().await.map(drop);
        assert!(matches!(claimed, Err(Error::NotInstalled(_))), "{claimed:?}");
        let seen = fence.observe("job").changed().await;
        assert!(matches!(seen, Err(Error::NotInstalled(_))), "{seen:?}");
        let led = fence.lease("job").lead(async |_| Ok::<_, Error>(())).await;
        assert!(matches!(led, Err(Error::NotInstalled(_))), "{led:?}");
    }
    let lease = shop.lease().await;
    let mut client = client().await;
    client.batch_execute("SET search_path = pg_temp").await.unwrap();
    let guarded = lease.guard(&mut client).await.map(drop);
    assert!(matches!(guarded, Err(Error::NotInstalled(_))), "{guarded:?}");
    lease.release().await.unwrap();
}

#[tokio::test]
async fn an_acquire_that_is_not_answered_says_so() {
    // Takes connections, and says nothing.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port();
    let fence = Fence::new(&format!("host=127.0.0.1 port={port} user=postgres")).unwrap();
    for wait in [Duration::ZERO, Duration::from_millis(100)] {
        let request = fence.lease("silent").ttl(Duration::from_millis(900)).wait(wait);
        let error = tokio::time::timeout(PATIENCE, request.acquire()).await.unwrap().unwrap_err();
        let Error::AcquireTimeout(timeout) = &error else { panic!("{error:?}") };
        assert_eq!(timeout.names(), ["silent"]);
        assert!(error.to_string().contains("silent"), "{error}");
    }
    wait_until("nothing is left", async || tasks() == 0).await;
}

#[tokio::test]
async fn a_transaction_that_the_work_has_ended_is_not_committed_in_silence() {
    let shop = Shop::new("ended_by_work").await;
    let lease = shop.lease().await;
    let mut client = client().await;
    for presents in [false, true] {
        let guarded = match presents {
            false => lease.guard(&mut client).await.unwrap(),
            true => lease.present(&mut client).await.unwrap(),
        };
        guarded.execute(&shop.set("undone"), &[]).await.unwrap();
        guarded.batch_execute("ROLLBACK").await.unwrap();
        let error = guarded.commit().await.unwrap_err();
        assert_eq!(error.sqlstate(), Some("25P01"), "{error:?}");
        assert_eq!(shop.status().await, "new");
    }
    let mut transaction = client.transaction().await.unwrap();
    let guarded = lease.guard(&mut transaction).await.unwrap();
    assert!(guarded.execute("SELECT 1/0", &[]).await.is_err());
    assert_eq!(guarded.commit().await.unwrap_err().sqlstate(), Some("25P02"));
    drop(transaction);
    lease.release().await.unwrap();
}

#[tokio::test]
async fn names_are_taken_in_any_form() {
    let shop = Shop::new("forms").await;
    let (a, b) = ("forms:a".to_owned(), "forms:b");
    let one = [shop.fence.lease(&a), shop.fence.lease(a.clone()), shop.fence.lease([b])];
    for request in one {
        request.acquire().await.unwrap().release().await.unwrap();
    }
    let both = [a.as_str(), b];
    let taken = shop.fence.lease(both).acquire().await.unwrap();
    for request in [shop.fence.lease(both.to_vec()), shop.fence.lease(&both[..])] {
        assert!(request.try_acquire().await.unwrap().is_none());
    }
    taken.release().await.unwrap();
}
