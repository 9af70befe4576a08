//! The server that the jobs ask for amounts: an HTTP server that answers a request when the test says so, like a slow
//! remote service.

use pg_test::{Context, Result};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

/// Hands out the requests in the order of their arrival.
pub struct FakePaymentServer {
    port: u16,
    requests: Receiver<Request>,
}

/// A worker that waits for its amount.
pub struct Request(TcpStream);

impl FakePaymentServer {
    pub fn start() -> Result<FakePaymentServer> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let port = listener.local_addr()?.port();
        let (sender, requests) = mpsc::channel();
        std::thread::Builder::new().name("payments".to_owned()).spawn(move || {
            for stream in listener.incoming().flatten() {
                if is_request(&stream) && sender.send(Request(stream)).is_err() {
                    return;
                }
            }
        })?;
        Ok(FakePaymentServer { port, requests })
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/amount", self.port)
    }

    /// Returns the next request, if one arrives within that time.
    pub fn next(&self, limit: Duration) -> Result<Option<Request>> {
        match self.requests.recv_timeout(limit) {
            Ok(request) => Ok(Some(request)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                Err(RecvTimeoutError::Disconnected).context("the payment server is gone")
            }
        }
    }
}

impl Request {
    /// Answers a request. Its client may be gone.
    pub fn answer(mut self, amount: i32) {
        let (body, head) = (amount.to_string(), "HTTP/1.1 200 OK\r\nConnection: close");
        let _ = write!(self.0, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    }
}

/// Reads a request up to its empty line. Returns false for a connection without a request.
fn is_request(stream: &TcpStream) -> bool {
    let lines = BufReader::new(stream).lines();
    lines.map_while(|line| line.ok()).any(|line| line.is_empty())
}
