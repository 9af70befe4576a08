//! What is shown, and the jump by hand.

use super::arguments;
use crate::pg::call::args::{text_datum, Answer, Args};
use crate::pg::call::composite;
use crate::pg::call::errors::Refusal;
use crate::pg::locks::lock::LockTag;
use crate::pg::locks::session_lock::SessionLock;
use crate::pg::session::server;
use crate::pg::state::lease_table::{Access, LeaseTable};
use crate::pg::state::relation;
use crate::pg::state::row::Row;
use crate::tokens;
use pg_fence_rules::locks::{Lock, TAKE_SLOT};

/// `fence_new_epoch() → bigint`: makes the token sequence jump, and gives back where to. Errors: 25006, 55000.
pub fn new_epoch(_: Args) -> Result<Answer, Refusal> {
    server::writable(c"fence_new_epoch()");
    Ok(tokens::new_epoch()?.into())
}

/// `fence_status()`: one row. Writes nothing, and works on a standby, where the last token is NULL.
pub fn status(args: Args) -> Result<Answer, Refusal> {
    let version = relation::sql_version();
    Ok(composite::row(
        args,
        &[
            tokens::last()?.map(|last| last.bigint().into()),
            Some((server::timeline() as i32).into()),
            Some((server::system_identifier() as i64).into()),
            Some(tokens::jumps()?.into()),
            Some(server::in_recovery().into()),
            Some(text_datum(relation::LIBRARY_VERSION.as_bytes())),
            version.map(|v| text_datum(v.as_bytes())),
        ],
    ))
}

/// `fence.blocking_pids(name, slot) → integer[]`: the sessions that keep a grant from being replaced, as guards do; 0 for
/// a prepared transaction.
pub fn blocking_pids(args: Args) -> Result<Answer, Refusal> {
    let (Some(name), Some(slot)) = (args.text(0), args.int4(1)) else { return Ok(Answer::Null) };
    // What keeps a grant from being replaced: guards. Renewals and grants in the making are over soon.
    Ok(composite::int4_array(
        &LockTag::new(Lock::Grant, &name, slot).conflicting_pids(TAKE_SLOT.mode),
    ))
}

/// `fence.session_alive(first_token) → boolean`: does the session live that acquired the grant with this first token,
/// as `session => true` asks? True on a standby, which cannot tell.
pub fn session_alive(args: Args) -> Result<Answer, Refusal> {
    Ok(args.token(0).map_or(Answer::Null, |first| SessionLock::of(first).is_held().into()))
}

/// `fence.uncommitted_grants(name) → setof fence.lease`: what other sessions have acquired and not committed, of one
/// lease or of all. A standby has the rows, but cannot tell whose they are.
pub fn uncommitted_grants(args: Args) -> Result<Answer, Refusal> {
    let rows = if server::in_recovery() || !LockTag::others_write_grants() {
        Vec::new()
    } else {
        let table = LeaseTable::open(Access::Read)?;
        match args.text(0) {
            Some(name) => table.uncommitted_of(&name),
            None => table.uncommitted(),
        }
    };
    Ok(composite::rows(args, rows.iter().map(Row::tuple)))
}

/// `fence.checked_lease_name(name, token) → text`
pub fn checked_lease_name(args: Args) -> Result<Answer, Refusal> {
    let name = arguments::name(&args, 0)?;
    if args.token(1).is_some() {
        arguments::token(&args, 1)?;
    }
    Ok(Answer::Value(text_datum(&name)))
}

/// `fence.record_creation()`: begins the life of the database in which the extension is created.
pub fn record_creation(_: Args) -> Result<Answer, Refusal> {
    tokens::record_creation()?;
    Ok(Answer::Null)
}
