//! The statements that keep a lease.

use crate::error::{Error, Reason};
use crate::own::{Call, Limits, OwnConnection, argument, is_timeout, only_value};
use crate::state::Shared;
use std::sync::Arc;
use std::time::Duration;
use tokio_postgres::types::Type;

/// How long a renewal waits for somebody's open transaction, at least.
pub(crate) const LOCK: Duration = Duration::from_millis(10);

/// In the order of names, in which all clients lock them.
pub(crate) fn renewal(batch: &[Arc<Shared>]) -> Call {
    if let [lease] = batch {
        return call_on_names(lease, "lease_renew");
    }
    let names: Vec<String> = batch.iter().map(|lease| lease.names[0].clone()).collect();
    let tokens: Vec<i64> = batch.iter().map(|lease| lease.token()).collect();
    let call = batch[0].select(
        "lease_renew(x.name, x.token) FROM unnest($1::text[], $2::bigint[]) AS x(name, token)",
    );
    Call {
        sql: call,
        arguments: vec![argument(names, Type::TEXT_ARRAY), argument(tokens, Type::INT8_ARRAY)],
    }
}

/// Gives it back, or lets it live on until it has been held for as long as it should.
pub(crate) fn closing(shared: &Shared) -> Call {
    let left = shared.lives_on();
    if left.is_zero() {
        return call_on_names(shared, "lease_release");
    }
    let mut call = call_on_names(shared, "lease_renew");
    call.sql = call.sql.replace("$2::bigint", "$2::bigint, $3::text::interval");
    call.arguments.push(argument(interval(left), Type::TEXT));
    call
}

/// A function of the lease's names and its token.
pub(crate) fn call_on_names(shared: &Shared, function: &str) -> Call {
    let token = argument(shared.token(), Type::INT8);
    match &*shared.names {
        [name] => Call {
            sql: shared.select(&format!("{function}($1::text, $2::bigint)")),
            arguments: vec![argument(name.clone(), Type::TEXT), token],
        },
        names => Call {
            sql: shared.select(&format!("{function}_all($1::text[], $2::bigint)")),
            arguments: vec![argument(names.to_vec(), Type::TEXT_ARRAY), token],
        },
    }
}

/// As PostgreSQL reads it. A text: the driver has no type for it.
pub(crate) fn interval(span: Duration) -> String {
    format!("{} microseconds", span.as_micros())
}

/// Gives it back; or answers after which pause to try again, where somebody's transaction is to be waited for: nobody else
/// waits along. With `again`, on another connection where this one has ended.
pub(crate) async fn release(
    own: &mut OwnConnection,
    lease: &Shared,
    limits: Limits,
    again: bool,
) -> Option<Duration> {
    let reuses_connection = own.is_open();
    let call = closing(lease);
    let mut outcome = own.call_within(limits, &call).await;
    let mut is_second = false;
    if again && reuses_connection && outcome.as_ref().is_err_and(has_ended_unseen) {
        outcome = own.call_within(limits, &call).await;
        is_second = true;
    }
    match outcome.and_then(|rows| only_value(&rows).map_err(Error::unclassified)) {
        // Of the first call the answer may have been lost.
        Ok(None) if !is_second => lease.lose(Reason::Gone, None),
        Ok(_) => drop(lease.released()),
        Err(error) if error.sqlstate() == Some("55P03") && !lease.has_waited_for_its_end() => {
            return Some((lease.twelfth() / 10).max(LOCK));
        }
        Err(error) => {
            log::warn!("the lease {} was not released: {error}", lease.names[0]);
            lease.released();
        }
    }
    None
}

pub(crate) fn has_ended_unseen(error: &Error) -> bool {
    error.is_end_of_session() && !is_timeout(error)
}
