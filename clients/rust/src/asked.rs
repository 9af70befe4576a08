//! What a caller asks for, looked over before anything is sent; and the statements that ask it of the server.

use crate::error::Error;
use crate::line::Call;
use serde_json::Value;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;
use tokio_postgres::types::Type;

/// A shorter ttl leaves no time for a renewal.
const SHORTEST: Duration = Duration::from_millis(100);

/// One name, or several: whatever is taken where a lease is asked for.
#[derive(Debug, Clone)]
pub struct Names(pub(crate) Vec<String>);

impl From<&str> for Names {
    fn from(name: &str) -> Names {
        Names(vec![name.to_owned()])
    }
}

impl From<String> for Names {
    fn from(name: String) -> Names {
        Names(vec![name])
    }
}

impl<N: Into<String>, const COUNT: usize> From<[N; COUNT]> for Names {
    fn from(names: [N; COUNT]) -> Names {
        Names(names.into_iter().map(Into::into).collect())
    }
}

impl<N: Into<String>> From<Vec<N>> for Names {
    fn from(names: Vec<N>) -> Names {
        Names(names.into_iter().map(Into::into).collect())
    }
}

impl<N: AsRef<str>> From<&[N]> for Names {
    fn from(names: &[N]) -> Names {
        Names(names.iter().map(|name| name.as_ref().to_owned()).collect())
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub names: Vec<String>,
    pub ttl: Duration,
    pub wait: Duration,
    pub holder: Option<String>,
    pub metadata: Option<Value>,
    pub shared: bool,
    pub slots: i32,
    pub reclaim: bool,
    pub session: bool,
}

impl Asked {
    pub fn new(names: Names) -> Asked {
        let (ttl, wait) = (Duration::from_secs(30), Duration::ZERO);
        let (holder, metadata, shared, slots) = (None, None, false, 1);
        let (reclaim, session) = (false, false);
        Asked { names: names.0, ttl, wait, holder, metadata, shared, slots, reclaim, session }
    }

    /// With a holder, and nothing that makes no sense.
    pub fn checked(mut self) -> Result<Asked, Error> {
        let refused = |why: &str| Err(Error::Invalid(why.to_owned()));
        if self.names.is_empty() {
            return refused("a lease needs a name");
        }
        if self.names.len() > 1 && (self.shared || self.slots != 1 || self.reclaim) {
            return refused("several names at once are exclusive: no shared, slots or reclaim");
        }
        if self.ttl < SHORTEST {
            return refused("ttl is 100 ms or more, for it is renewed meanwhile");
        }
        if self.reclaim && self.holder.is_none() {
            return refused("reclaim takes a holder: whose lease is it?");
        }
        self.holder.get_or_insert_with(unique_holder);
        Ok(self)
    }

    /// One try, or a portion of the wait. Where the role has a limit for statements or locks, it ends before that.
    pub fn call(&self, schema: &str, portion: Duration) -> Call {
        let metadata = self.metadata.as_ref().map(Value::to_string);
        if self.names.len() > 1 {
            let sql = format!(
                "SELECT {schema}lease_acquire_all($1::text[], $2::text, $3::interval, $4::jsonb, $5::boolean)"
            );
            let call = Call::new(sql).with(self.names.clone(), Type::TEXT_ARRAY);
            let call = call.with(self.holder.clone(), Type::TEXT).with_time(self.ttl);
            return call.with(metadata, Type::TEXT).with(self.session, Type::BOOL);
        }
        let sql = format!(
            "SELECT {schema}lease_acquire($1::text, $2::text, $3::interval, least($4::interval, \
             nullif(current_setting('statement_timeout'), '0')::interval / 2, \
             nullif(current_setting('lock_timeout'), '0')::interval / 2), \
             $5::jsonb, $6::boolean, $7::integer, $8::boolean, $9::boolean)"
        );
        let call = Call::new(sql).with(self.names[0].clone(), Type::TEXT);
        let call =
            call.with(self.holder.clone(), Type::TEXT).with_time(self.ttl).with_time(portion);
        let call = call.with(metadata, Type::TEXT).with(self.shared, Type::BOOL);
        let call = call.with(self.slots, Type::INT4).with(self.reclaim, Type::BOOL);
        call.with(self.session, Type::BOOL)
    }
}

/// What the view of all leases shows as the holder, unless one is named.
pub(crate) fn unique_holder() -> String {
    let host = rustix::system::uname();
    let random = RandomState::new().hash_one(()) as u32;
    format!("{}/{}/{random:08x}", host.nodename().to_string_lossy(), std::process::id())
}

pub(crate) fn keep(schema: &str, names: Vec<String>, tokens: Vec<i64>) -> Call {
    let sql = format!(
        "SELECT outcome, extract(epoch FROM remaining)::float8, extract(epoch FROM again_in)::float8 \
         FROM {schema}lease_keep($1::text[], $2::bigint[])"
    );
    Call::new(sql).with(names, Type::TEXT_ARRAY).with(tokens, Type::INT8_ARRAY)
}

/// It waits no longer than that for the lock of somebody's open transaction.
pub(crate) fn release_aside(
    schema: &str,
    names: Vec<String>,
    tokens: Vec<i64>,
    lock: Duration,
) -> Call {
    let sql = format!(
        "SELECT {schema}lease_release(x.name, x.token) FROM set_config('lock_timeout', $3, true), \
         unnest($1::text[], $2::bigint[]) AS x(name, token)"
    );
    let call = Call::new(sql).with(names, Type::TEXT_ARRAY).with(tokens, Type::INT8_ARRAY);
    call.with(lock.as_millis().clamp(10, i32::MAX as u128).to_string(), Type::TEXT)
}

pub(crate) fn holder_of(schema: &str, names: &[String]) -> Call {
    let sql = format!(
        "SELECT i.holder, extract(epoch FROM i.remaining)::float8 FROM unnest($1::text[]) AS n(name), \
         {schema}lease_info(n.name) AS i WHERE i.state IN ('held', 'uncommitted') \
         ORDER BY i.remaining DESC NULLS LAST LIMIT 1"
    );
    Call::new(sql).with(names.to_vec(), Type::TEXT_ARRAY)
}

pub(crate) fn any(schema: &str, asked: &Asked, n: i32) -> Call {
    let sql = format!(
        "SELECT name, token FROM {schema}lease_acquire_any($1::text[], $2::integer, $3::text, $4::interval)"
    );
    let call = Call::new(sql).with(asked.names.clone(), Type::TEXT_ARRAY).with(n, Type::INT4);
    call.with(asked.holder.clone(), Type::TEXT).with_time(asked.ttl)
}
