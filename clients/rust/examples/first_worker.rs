use pg_fence_client::{Error, Fence, connect};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let url = std::env::args().nth(1).expect("where to connect");
    let fence = Fence::new(&url)?;
    let work = fence.lease("order:7").hold(async |lease| {
        let mut client = connect(&url, tokio_postgres::NoTls).await?;
        tokio::time::sleep(std::time::Duration::from_secs(2)).await; // long work: the lease is kept meanwhile
        let transaction = lease.guard(&mut client).await?;
        transaction.execute("UPDATE orders SET status = 'paid' WHERE id = 7", &[]).await?;
        transaction.commit().await?;
        println!("order 7 is paid, under the token {}", lease.token());
        Ok(())
    });
    match work.await {
        Err(taken @ Error::LeaseTaken { .. }) => println!("another worker is at it: {taken}"),
        Err(loss @ Error::LeaseLost { .. }) => println!("stop, and report no failure: {loss}"),
        done => done?,
    }
    fence.close().await;
    Ok(())
}
