//! The one heartbeat of all leases of a fence.

use super::*;

impl Shop {
    /// A fence whose connections can be told from others.
    fn fence_called(&self, name: &str) -> Fence {
        Fence::new(&format!("{}&application_name={name}", url())).unwrap()
    }

    async fn sessions(&self, name: &str) -> i64 {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1";
        self.value(sql, &[&name]).await
    }

    async fn terminate(&self, name: &str) {
        let sql = "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity WHERE application_name = $1";
        self.admin.query_one(sql, &[&name]).await.unwrap();
    }
}

#[tokio::test]
async fn a_hundred_leases_have_one_connection_and_two_tasks() {
    let shop = Shop::new("hundred").await;
    let fence = shop.fence_called("hundred");
    let before = tasks();
    let mut leases = Vec::new();
    for number in 0..100 {
        leases.push(fence.lease(format!("hundred:{number}")).ttl(LONG).acquire().await.unwrap());
    }
    assert_eq!(shop.sessions("hundred").await, 1);
    // And the one that drives the connection.
    assert_eq!(tasks(), before + 3);
    let clone = fence.clone();
    let waited = clone.lease("hundred:100").ttl(LONG).wait(LONG).acquire().await.unwrap();
    wait_until("its own connection is closed", async || shop.sessions("hundred").await == 1).await;
    waited.release().await.unwrap();
    for lease in leases {
        assert!(lease.renew().await.unwrap() > Some(lease.token()));
        lease.release().await.unwrap();
    }
    wait_until("it is closed", async || shop.sessions("hundred").await == 0).await;
    wait_until("its tasks have ended", async || tasks() == before).await;
}

#[tokio::test]
async fn one_that_has_waited_hands_its_connection_to_the_heartbeat() {
    let shop = Shop::new("handed").await;
    let fence = shop.fence_called("handed");
    let lease = fence.lease(shop.order()).ttl(LONG).wait(LONG).acquire().await.unwrap();
    let pid = "SELECT pid FROM pg_stat_activity WHERE application_name = 'handed'";
    let first: i32 = shop.value(pid, &[]).await;
    assert!(lease.renew().await.unwrap().is_some());
    assert_eq!(first, shop.value::<i32>(pid, &[]).await);
    lease.release().await.unwrap();
}

#[tokio::test]
async fn a_connection_that_has_ended_unseen_costs_nobody_anything() {
    let shop = Shop::new("unseen").await;
    let fence = shop.fence_called("unseen");
    let lease = fence.lease(shop.order()).ttl(LONG).acquire().await.unwrap();
    shop.terminate("unseen").await;
    let other = fence.lease("unseen:8").ttl(LONG).acquire().await.unwrap();
    shop.terminate("unseen").await;
    assert!(lease.renew().await.unwrap().is_some());
    shop.terminate("unseen").await;
    other.release().await.unwrap();
    lease.release().await.unwrap();
    assert!(!shop.is_held("unseen:8").await && !shop.is_held(&shop.order()).await);
}

/// As an application does that renews in a transaction with its work.
async fn locked(names: &[&str]) -> Connected {
    let client = client().await;
    client.batch_execute("BEGIN").await.unwrap();
    for name in names {
        let sql = "SELECT lease_renew($1, first_token) FROM lease_info($1) WHERE state = 'held'";
        client.query_one(sql, &[name]).await.unwrap();
    }
    client
}

#[tokio::test]
async fn what_somebody_s_transaction_holds_up_holds_up_nobody_else() {
    let shop = Shop::new("held_up").await;
    let mut leases = Vec::new();
    for number in 0..20 {
        let request = shop.fence.lease(format!("held_up:{number}")).ttl(Duration::from_secs(3));
        leases.push(request.acquire().await.unwrap());
    }
    let long = shop.fence.lease("held_up:long").ttl(LONG).acquire().await.unwrap();
    let locks = locked(&["held_up:3", "held_up:9", "held_up:long"]).await;
    // It waits for that transaction, and nobody waits for it.
    let releases = tokio::spawn({
        let long = long.clone();
        async move { long.release().await }
    });
    let losses = futures_of(&leases);
    let lost = tokio::time::timeout(PATIENCE, losses).await.unwrap();
    assert_eq!(lost, [3, 9]);
    assert!(shop.is_held("held_up:long").await && !releases.is_finished());
    locks.batch_execute("ROLLBACK").await.unwrap();
    releases.await.unwrap().unwrap();
    assert!(!shop.is_held("held_up:long").await);
    for (number, lease) in leases.iter().enumerate() {
        assert_eq!(lease.held(), ![3, 9].contains(&number), "{number}");
        let _ = lease.release().await;
    }
}

#[tokio::test]
async fn a_renewal_asked_for_during_another_is_one_of_its_own() {
    let shop = Shop::new("asked_twice").await;
    let fence = shop.fence_called("asked_twice");
    let lease = fence.lease(shop.order()).ttl(LONG).acquire().await.unwrap();
    let locks = locked(&[&shop.order()]).await;
    let renews = || {
        let lease = lease.clone();
        tokio::spawn(async move { lease.renew().await.unwrap() })
    };
    let first = renews();
    let sql = "SELECT count(*) FROM pg_stat_activity
               WHERE application_name = 'asked_twice' AND wait_event_type = 'Lock'";
    wait_until("it waits", async || shop.value::<i64>(sql, &[]).await == 1).await;
    let second = renews();
    // It has asked by now.
    tokio::task::yield_now().await;
    locks.batch_execute("ROLLBACK").await.unwrap();
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    assert!(first.is_some() && second > first, "{first:?} {second:?}");
    lease.release().await.unwrap();
}

#[tokio::test]
async fn many_that_are_locked_hold_up_no_other() {
    let shop = Shop::new("many_locked").await;
    let mut leases = Vec::new();
    for number in 0..300 {
        let request = shop.fence.lease(format!("many_locked:{number}")).ttl(Duration::from_secs(6));
        leases.push(request.acquire().await.unwrap());
    }
    let names: Vec<String> = (0..150).map(|number| format!("many_locked:{}", 2 * number)).collect();
    let locks = locked(&names.iter().map(String::as_str).collect::<Vec<_>>()).await;
    for number in (0..300).step_by(2) {
        let lost = tokio::time::timeout(PATIENCE, leases[number].lost()).await.unwrap();
        assert_eq!(lost.unwrap().reason(), Reason::Deadline);
    }
    let lost = (0..300).filter(|number| number % 2 == 1 && !leases[*number].held()).count();
    assert_eq!(lost, 0);
    locks.batch_execute("ROLLBACK").await.unwrap();
    for lease in leases {
        let _ = lease.release().await;
    }
}

/// Which are the first two to be lost, in their order.
async fn futures_of(leases: &[Lease]) -> Vec<usize> {
    let mut lost = Vec::new();
    while lost.len() < 2 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let gone = |(number, lease): (usize, &Lease)| lease.loss().map(|_| number);
        lost = leases.iter().enumerate().filter_map(gone).collect();
    }
    lost
}

#[tokio::test]
async fn one_that_stands_apart_comes_back() {
    let shop = Shop::new("apart").await;
    let ttl = Duration::from_secs(6);
    let one = shop.fence.lease("apart:1").ttl(ttl).acquire().await.unwrap();
    let other = shop.fence.lease("apart:2").ttl(ttl).acquire().await.unwrap();
    let locks = locked(&["apart:1"]).await;
    assert_eq!(one.renew().await.unwrap(), None, "it is locked");
    assert!(other.renew().await.unwrap().is_some());
    locks.batch_execute("ROLLBACK").await.unwrap();
    wait_until("it is renewed", async || one.remaining() > Duration::from_millis(5500)).await;
    one.release().await.unwrap();
    other.release().await.unwrap();
}

#[tokio::test]
async fn a_session_lease_keeps_its_own_connection() {
    let shop = Shop::new("session_of_its_own").await;
    let name = "session_of_its_own";
    let fence = shop.fence_called(name);
    let plain = fence.lease("session_of_its_own:8").ttl(LONG).acquire().await.unwrap();
    let lease = fence.lease(shop.order()).ttl(LONG).session().acquire().await.unwrap();
    assert_eq!(shop.sessions(name).await, 2);
    assert!(lease.renew().await.unwrap().is_some());
    lease.release().await.unwrap();
    assert!(!shop.is_held(&shop.order()).await);
    wait_until("its session has ended", async || shop.sessions(name).await == 1).await;
    plain.release().await.unwrap();
}

#[tokio::test]
async fn fences_of_other_schemas_have_heartbeats_of_their_own() {
    let shop = Shop::new("other_schemas").await;
    let fence = shop.fence_called("other_schemas");
    let other = fence.clone().in_schema(&shop.schema().await);
    let one = fence.lease("other_schemas:1").ttl(LONG).acquire().await.unwrap();
    let two = other.lease("other_schemas:2").ttl(LONG).acquire().await.unwrap();
    assert_eq!(shop.sessions("other_schemas").await, 2);
    assert!(one.renew().await.unwrap().is_some() && two.renew().await.unwrap().is_some());
    one.release().await.unwrap();
    two.release().await.unwrap();
}

#[tokio::test]
async fn a_lease_that_is_held_for_long_enough_is_not_renewed() {
    let shop = Shop::new("at_most").await;
    let request = shop.fence.lease(shop.order()).ttl(Duration::from_secs(2));
    let lease = request.hold_at_most(Duration::ZERO).acquire().await.unwrap();
    assert_eq!(lease.renew().await.unwrap(), None);
    let loss = tokio::time::timeout(PATIENCE, lease.lost()).await.unwrap().unwrap();
    assert_eq!(loss.reason(), Reason::Deadline);
}
