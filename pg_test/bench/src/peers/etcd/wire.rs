//! The few calls and messages of etcd's protocol that are needed, with the numbers of its `.proto` files, so that no
//! code need be generated from those.

use anyhow::{Context, Result, ensure};
use prost::Message;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tonic::Request;
use tonic::client::Grpc;
use tonic::codec::{ProstCodec, Streaming};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::tokio_stream::{self, StreamExt};
use tonic::transport::{Channel, Endpoint};

/// A revision of etcd's history, which grows with each change and so can serve as a fencing token.
pub struct Revision(pub i64);

/// An open connection.
pub struct Connection {
    runtime: Runtime,
    grpc: Grpc<Channel>,
}

impl Connection {
    /// Connects to a server on loopback.
    pub fn open(port: u16) -> Result<Connection> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}"))?.tcp_nodelay(true);
        let channel = runtime.block_on(endpoint.connect())?;
        Ok(Connection { runtime, grpc: Grpc::new(channel) })
    }

    fn call<Q, A>(&mut self, path: &'static str, question: Q) -> Result<A>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let Connection { runtime, grpc } = self;
        runtime.block_on(async {
            grpc.ready().await?;
            let path = PathAndQuery::from_static(path);
            let answer = grpc.unary(Request::new(question), path, ProstCodec::default()).await?;
            Ok(answer.into_inner())
        })
    }

    /// Grants an etcd lease with this ttl, and returns its id.
    pub fn grant(&mut self, ttl: Duration) -> Result<i64> {
        let question = LeaseGrant { ttl: ttl.as_secs() as i64 };
        let granted: LeaseGranted = self.call("/etcdserverpb.Lease/LeaseGrant", question)?;
        Ok(granted.id)
    }

    /// Revokes an etcd lease, and with it the keys tied to it.
    pub fn revoke(&mut self, lease: i64) -> Result<()> {
        let _: Answer = self.call("/etcdserverpb.Lease/LeaseRevoke", LeaseRevoke { id: lease })?;
        Ok(())
    }

    /// Puts a key if it does not exist.
    pub fn put_if_absent(
        &mut self,
        key: &str,
        value: &str,
        lease: i64,
    ) -> Result<Option<Revision>> {
        let put = Put { key: key.into(), value: value.into(), lease };
        self.transaction(key, 0, Operation { put: Some(put), delete: None })
    }

    /// Deletes a key if it was put at that revision.
    pub fn delete_if(&mut self, key: &str, put_at: Revision) -> Result<bool> {
        let delete = Delete { key: key.into() };
        let operation = Operation { put: None, delete: Some(delete) };
        Ok(self.transaction(key, put_at.0, operation)?.is_some())
    }

    fn transaction(
        &mut self,
        key: &str,
        created_at: i64,
        operation: Operation,
    ) -> Result<Option<Revision>> {
        // The zeros mean: equal (result). Target 1 is the revision at which the key was created.
        let compare = Compare { target: 1, key: key.into(), created_at: Some(created_at) };
        let question = Txn { compare: vec![compare], success: vec![operation] };
        let done: TxnDone = self.call("/etcdserverpb.KV/Txn", question)?;
        let revision = done.header.context("an answer without a header")?.revision;
        Ok(done.succeeded.then_some(Revision(revision)))
    }
}

/// A stream of the events of a key.
pub struct Watch(Streaming<WatchAnswer>);

impl Connection {
    /// Watches a key from now on.
    pub fn watch(&mut self, key: &str) -> Result<Watch> {
        let Connection { runtime, grpc } = self;
        runtime.block_on(async {
            grpc.ready().await?;
            let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
            let create = WatchQuestion { create: Some(WatchCreate { key: key.into() }) };
            // The request stream stays open, because closing it would end the watch.
            let questions = tokio_stream::once(create).chain(tokio_stream::pending());
            let answers = grpc
                .streaming(Request::new(questions), path, ProstCodec::default())
                .await?
                .into_inner();
            let mut watch = Watch(answers);
            let first = watch.0.message().await?.context("the watch has ended")?;
            ensure!(first.created, "the watch was not created");
            Ok(watch)
        })
    }

    /// Waits until the watch shows that the key was deleted, for at most `limit`.
    pub fn await_deletion(&mut self, watch: &mut Watch, limit: Duration) -> Result<bool> {
        self.runtime.block_on(async {
            let wanted = async {
                loop {
                    let answer = watch.0.message().await?.context("the watch has ended")?;
                    if answer.events.iter().any(|event| event.kind == DELETED) {
                        return Ok(());
                    }
                }
            };
            match tokio::time::timeout(limit, wanted).await {
                Ok(done) => done.map(|()| true),
                Err(_) => Ok(false),
            }
        })
    }
}

/// The event type of a deletion.
const DELETED: i32 = 1;

/// Messages as declared in the `.proto` files.
macro_rules! messages {
    ($($message:ident { $([$($kind:tt)*] $field:ident: $type:ty),* })*) => {
        $(
            #[derive(Clone, PartialEq, Message)]
            struct $message {
                $(#[prost($($kind)*)] $field: $type),*
            }
        )*
    };
}

messages! {
    WatchQuestion { [message, optional, tag = "1"] create: Option<WatchCreate> }
    WatchCreate { [bytes = "vec", tag = "1"] key: Vec<u8> }
    WatchAnswer { [bool, tag = "3"] created: bool, [message, repeated, tag = "11"] events: Vec<Event> }
    Event { [int32, tag = "1"] kind: i32 }
    Header { [int64, tag = "3"] revision: i64 }
    Answer { [message, optional, tag = "1"] header: Option<Header> }
    LeaseGrant { [int64, tag = "1"] ttl: i64 }
    LeaseGranted { [int64, tag = "2"] id: i64 }
    LeaseRevoke { [int64, tag = "1"] id: i64 }
    Txn {
        [message, repeated, tag = "1"] compare: Vec<Compare>,
        [message, repeated, tag = "2"] success: Vec<Operation>
    }
    Compare {
        [int32, tag = "2"] target: i32,
        [bytes = "vec", tag = "3"] key: Vec<u8>,
        [int64, optional, tag = "5"] created_at: Option<i64>
    }
    Operation {
        [message, optional, tag = "2"] put: Option<Put>,
        [message, optional, tag = "3"] delete: Option<Delete>
    }
    Put {
        [bytes = "vec", tag = "1"] key: Vec<u8>,
        [bytes = "vec", tag = "2"] value: Vec<u8>,
        [int64, tag = "3"] lease: i64
    }
    Delete { [bytes = "vec", tag = "1"] key: Vec<u8> }
    TxnDone { [message, optional, tag = "1"] header: Option<Header>, [bool, tag = "2"] succeeded: bool }
}
