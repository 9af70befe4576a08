use pg_fence_client::{Error, Fence, connect};
use std::time::Duration;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let url = std::env::args().nth(1).expect("where to connect");
    let order = Fence::new(&url)?.lease("order:7").ttl(Duration::from_secs(30));
    let work = order.hold(async |lease| {
        let mut client = connect(&url, tokio_postgres::NoTls).await?;
        tokio::time::sleep(Duration::from_secs(2)).await; // long work: the lease is kept meanwhile
        let transaction = lease.guard(&mut client).await?;
        transaction.execute("UPDATE orders SET status = 'paid' WHERE id = 7", &[]).await?;
        transaction.commit().await?;
        println!("order 7 is paid, under the token {}", lease.token());
        Ok(())
    });
    match work.await {
        Err(Error::LeaseTaken(taken)) => println!("another worker is at it: {taken}"),
        Err(Error::LeaseLost(loss)) => println!("stop, and report no failure: {loss}"),
        done => done?,
    }
    Ok(())
}
