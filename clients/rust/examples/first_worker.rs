use pg_fence_client::{Error, Fence, connect};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let url = std::env::args().nth(1).expect("where to connect");
    let order = Fence::new(&url)?.lease("order:7").ttl(std::time::Duration::from_secs(30));
    let work = order.hold(async |lease| {
        let mut client = connect(&url, tokio_postgres::NoTls).await?;
        // Whatever takes long goes here: a heartbeat keeps the lease meanwhile.
        let transaction = lease.guard(&mut client).await?;
        transaction.execute("UPDATE orders SET status = 'paid' WHERE id = 7", &[]).await?;
        transaction.commit().await
    });
    match work.await {
        Err(Error::LeaseTaken(_)) => println!("somebody else is at it"),
        Err(Error::LeaseLost(loss)) => println!("stop, and report no failure: {loss}"),
        done => done?,
    }
    Ok(())
}
