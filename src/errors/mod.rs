//! All errors and warnings: the SQLSTATE, one line for people, JSON for programs, and a hint on what to do.

mod abbreviate;
mod sqlstate;

pub use abbreviate::cut_key as abbreviated_key;
pub use sqlstate::SqlState;

use crate::encoding::{to_utf8, within};
use pg_fence_rules::row_lease::Reason;
use pg_fence_rules::{Span, Token};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use std::borrow::Cow;

/// An error of a call or a write; also a warning or a line of the log.
pub struct Report {
    /// The kind of error, for programs.
    pub sqlstate: SqlState,
    /// MESSAGE: one line for people.
    pub message: String,
    /// HINT: what to do about the error; may be empty.
    pub hint: Cow<'static, str>,
    /// The schema, table and column of a refused write.
    pub location: Option<Box<Location>>,
    /// The content of DETAIL, not yet abbreviated.
    pub details: Box<Detail>,
}

/// The target of a refused write, in the database's encoding.
#[derive(Clone, Default)]
pub struct Location {
    /// The schema of the table.
    pub schema: Vec<u8>,
    /// The table.
    pub table: Vec<u8>,
    /// The fence column; empty if the error is not about a column.
    pub column: Vec<u8>,
}

/// The stable keys of DETAIL. A key is shown if it applies and the caller may know its value.
#[derive(Default, Serialize)]
pub struct Detail {
    /// The token that the write or call presented.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "bigint")]
    pub presented: Option<Token>,
    /// The row's token.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "bigint")]
    pub stored: Option<Token>,
    /// The name of the lease in question.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "abbreviate::text")]
    pub lease: Option<String>,
    /// The present or previous holder of the lease.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "abbreviate::text")]
    pub holder: Option<String>,
    /// The deadline of the holder's grant, ISO 8601 in UTC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    /// The table of the write, as SQL names it.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "abbreviate::text")]
    pub relation: Option<String>,
    /// The row's primary key.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "abbreviate::key")]
    pub key: Option<Map<String, Value>>,
    /// The column at fault.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "abbreviate::text")]
    pub column: Option<String>,
    /// The argument at fault.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub argument: Option<&'static str>,
    /// The number of slots in force.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<i32>,
    /// The number of lock table entries that one session may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub locks: Option<usize>,
    /// The role to which the lease was granted.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "abbreviate::text")]
    pub role: Option<String>,
    /// True if a renewal suffices: only a new epoch keeps the token from speaking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub renew_first: Option<bool>,
}

/// Writes a token as a JSON number.
fn bigint<S: Serializer>(token: &Option<Token>, to: S) -> Result<S::Ok, S::Error> {
    token.map(Token::bigint).serialize(to)
}

impl Report {
    fn new(sqlstate: SqlState, message: String, hint: impl Into<Cow<'static, str>>) -> Self {
        let (hint, details) = (hint.into(), Box::default());
        Report { sqlstate, message, hint, location: None, details }
    }

    /// Adds keys to DETAIL.
    pub fn detailed(mut self, fill: impl FnOnce(&mut Detail)) -> Self {
        fill(&mut self.details);
        self
    }

    /// Sets the error's schema, table and column fields.
    pub fn at(mut self, location: Location) -> Self {
        self.location = Some(Box::new(location));
        self
    }

    /// The text of DETAIL; empty if it has no keys.
    pub fn detail(&self) -> String {
        match serde_json::to_string(&self.details) {
            Ok(json) if json != "{}" => json,
            _ => String::new(),
        }
    }
}

/// The longest name that a message shows, in bytes; longer than any lease's.
const QUOTED_MAX: usize = 2048;

/// A name in quotes and on one line, for a message.
pub fn quoted(name: &[u8]) -> String {
    // The name may come from an argument of any length.
    let text: String = to_utf8(within(name, QUOTED_MAX))
        .chars()
        .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
        .collect();
    format!("\"{text}\"")
}

/// A name as an SQL identifier.
fn identifier(name: &[u8]) -> String {
    format!("\"{}\"", to_utf8(name).replace('"', "\"\""))
}

/// A text as an SQL literal that is valid under either value of `standard_conforming_strings`.
pub fn literal(text: &[u8]) -> String {
    let quoted = to_utf8(text).replace('\'', "''");
    if quoted.contains('\\') {
        format!("E'{}'", quoted.replace('\\', "\\\\"))
    } else {
        format!("'{quoted}'")
    }
}

/// The words for a lease in a message; `None` if its name must not appear.
fn lease_in_words(name: Option<&[u8]>) -> String {
    name.map_or_else(|| "the row's lease".into(), |name| format!("lease {}", quoted(name)))
}

// Errors of calls ----------------------------------------------------------------------------------------

/// 22004: NULL where a value is needed.
pub fn null_argument(argument: &'static str) -> Report {
    null(argument, "Pass a value.")
}

/// 22004: the token is NULL, usually because the lease was lost.
pub fn null_token() -> Report {
    null(
        "token",
        "NULL often means that lease_acquire, lease_renew or lease_release found the lease taken or lost: stop working.",
    )
}

/// 22004: NULL cannot be adopted as a number.
pub fn null_number() -> Report {
    null(
        "token",
        "Another lock service answers NULL, or nothing, where the lease was not granted: adopt only what it grants.",
    )
}

fn null(argument: &'static str, hint: &'static str) -> Report {
    Report::new(SqlState::NullValueNotAllowed, format!("{argument} must not be NULL"), hint)
        .detailed(|d| d.argument = Some(argument))
}

/// 22023: an argument is out of its range.
pub fn bad_argument(argument: &'static str, message: &str, hint: &'static str) -> Report {
    Report::new(SqlState::InvalidParameterValue, message.to_owned(), hint)
        .detailed(|d| d.argument = Some(argument))
}

/// 22023: the template of leases is too long.
pub fn long_template() -> Report {
    bad_argument(
        "lease",
        "the template of a lease is at most 8192 bytes long",
        "Write a shorter one: the name that it makes is at most 512 bytes long.",
    )
}

/// 22023: a ttl, or the time until a row's deadline, exceeds `pg_fence.max_ttl`.
pub fn above_setting(argument: &'static str, longest: Span) -> Report {
    let most = format!("at most {} s", longest.micros() / 1_000_000);
    let message = match argument {
        "deadline" => format!("a deadline may be {most} ahead here"),
        _ => format!("{argument} must be {most} here"),
    };
    bad_argument(
        argument,
        &message,
        "pg_fence.max_ttl says so for this role or database: ask for less, and renew more often.",
    )
}

/// 42501: the client set pg_fence.max_ttl when it connected, which hides the value recorded for its role.
pub fn limit_was_named() -> Report {
    Report::new(
        SqlState::InsufficientPrivilege,
        "pg_fence.max_ttl is for superusers, and this session has named it".into(),
        "Connect without it: it hides the limit that is set for the role or the database.",
    )
    .detailed(|d| d.argument = Some("ttl"))
}

/// 22023: the value of pg_fence.max_ttl recorded for the role or the database is invalid.
pub fn limit_is_invalid() -> Report {
    bad_argument(
        "ttl",
        "pg_fence.max_ttl has an invalid value for this role or database",
        "ALTER ROLE or ALTER DATABASE has recorded it where the library was not loaded. Set it anew, as '10 min', and reconnect.",
    )
}

/// 22023: the number of slots differs from that of the grants.
pub fn slots_differ(name: &[u8], live: i32, requested: i32) -> Report {
    Report::new(
        SqlState::InvalidParameterValue,
        format!("lease {} is held with slots = {live}, not {requested}", quoted(name)),
        "All callers must ask for the same number of slots while any of them holds the lease.",
    )
    .detailed(|d| {
        d.lease = Some(to_utf8(name));
        d.slots = Some(live);
    })
}

/// 40001: the transaction's snapshot is older than the grant that the call relies on.
pub fn snapshot_too_early(lease: Option<&[u8]>) -> Report {
    Report::new(
        SqlState::SerializationFailure,
        format!(
            "could not serialize access to {} due to concurrent changes",
            lease_in_words(lease)
        ),
        "The grant is newer than the transaction's snapshot, which may lack the previous holder's last writes: retry the transaction.",
    )
    .detailed(|d| d.lease = lease.map(to_utf8))
}

/// 40001: the transaction's snapshot is older than the definition of the table that is to be fenced.
pub fn table_changed() -> Report {
    Report::new(
        SqlState::SerializationFailure,
        "could not serialize access to the table due to concurrent changes of its definition"
            .into(),
        "The table, its columns or its triggers were changed after the transaction's snapshot: retry the transaction.",
    )
}

/// 55000: a transaction at REPEATABLE READ or above relies on a grant that it has made itself.
pub fn own_grant_after_snapshot(lease: Option<&[u8]>) -> Report {
    Report::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!("this transaction's snapshot is older than its grant of {}", lease_in_words(lease)),
        "Acquire in a transaction of its own and commit it, then begin this one: at REPEATABLE READ and above its reads may lack the previous holder's last writes.",
    )
    .detailed(|d| d.lease = lease.map(to_utf8))
}

/// The warning 01000: a lease was acquired at REPEATABLE READ or above.
pub fn reads_are_older(lease: &[u8]) -> Report {
    Report::new(
        SqlState::Warning,
        format!("this transaction's reads may be older than its grant of {}", lease_in_words(Some(lease))),
        "At REPEATABLE READ and above it can neither guard this grant nor write what is bound to the lease: commit first, then begin the transaction that works under it.",
    )
    .detailed(|d| d.lease = Some(to_utf8(lease)))
}

/// 0A000: a transaction that has acquired a session lease cannot be prepared.
pub fn session_lease_prepared() -> Report {
    Report::new(
        SqlState::FeatureNotSupported,
        "cannot PREPARE a transaction that has acquired a lease with session => true".into(),
        "Acquire it before, in a transaction of its own.",
    )
}

/// The warning 25P01: a guard ended with its own statement.
pub fn guarded_nothing(name: &[u8]) -> Report {
    Report::new(
        SqlState::NoActiveSqlTransaction,
        format!("lease_guard has guarded lease {} for its own statement only: the transaction has ended with it", quoted(name)),
        "Open a transaction first: BEGIN, lease_guard, the writes, COMMIT. A driver in autocommit mode ends the transaction with each statement.",
    )
    .detailed(|d| d.lease = Some(to_utf8(name)))
}

/// 53200: the session would use more than its quarter of the server's lock table, which has `most` entries.
pub fn lock_table_share(most: usize) -> Report {
    Report::new(
        SqlState::OutOfMemory,
        "too many leases for one transaction or session: it would fill the server's lock table".into(),
        "Use fewer leases in one transaction, hold fewer with session => true, or raise max_locks_per_transaction.",
    )
    .detailed(|d| d.locks = Some(most))
}

/// 53200: the server's lock table is full.
pub fn lock_table_full() -> Report {
    Report::new(
        SqlState::OutOfMemory,
        "the server's lock table is full".into(),
        "Try again when others have finished, or raise max_locks_per_transaction.",
    )
}

/// Adds to 53200 how to end more grants of one lease than a transaction may lock.
pub fn evict_in_portions(no_room: Report) -> Report {
    let hint = "End the lease's grants by lease_evict, some in each transaction, or raise max_locks_per_transaction.";
    Report { hint: hint.into(), ..no_room }
}

/// 55P03: the wait in a lease's queue exceeded `lock_timeout`, in PostgreSQL's own words.
pub fn lock_timeout() -> Report {
    Report::new(SqlState::LockNotAvailable, "canceling statement due to lock timeout".into(), "")
}

/// 42501: the lease was granted to another role.
pub fn not_your_lease(lease: Option<&[u8]>, role: Option<&[u8]>) -> Report {
    Report::new(
        SqlState::InsufficientPrivilege,
        format!("{} was granted to another role", lease_in_words(lease)),
        "Only the role that acquired a lease, a member of it or a superuser may use its tokens; lease_revoke ends anybody's.",
    )
    .detailed(|d| {
        d.lease = lease.map(to_utf8);
        d.role = role.map(to_utf8);
    })
}

/// 58030: it is unknown whether the server was started from a base backup.
pub fn unreadable_backup_label(error: &std::io::Error) -> Report {
    Report::new(
        SqlState::IoError,
        format!("could not read backup_label.old in the data directory: {error}"),
        "The file tells whether this server was restored from a base backup. Let the server's user read it. If it is broken, remove it and call fence_new_epoch().",
    )
}

/// 55000: an adopted lease cannot be acquired or renewed.
pub fn adopted_name(name: &[u8]) -> Report {
    Report::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!("{} is granted by somebody else, and adopted here", lease_in_words(Some(name))),
        "Adopt the number that its own service grants. For leases of this database take another name.",
    )
    .detailed(|d| d.lease = Some(to_utf8(name)))
}

/// 55000: a lease with grants of this database cannot be adopted.
pub fn granted_name(name: &[u8]) -> Report {
    Report::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!("{} is granted here, and cannot be adopted", lease_in_words(Some(name))),
        "Take another name for leases that somebody else grants. (lease_prune deletes what is long over.)",
    )
    .detailed(|d| d.lease = Some(to_utf8(name)))
}

/// PF001: the number can no longer be adopted.
pub fn stale_adoption(name: &[u8], presented: Token, stored: Token) -> Report {
    let lease = lease_in_words(Some(name));
    let (message, hint) = if presented < stored {
        (
            format!("stale fencing token {presented}: {lease} has had {stored}"),
            "A newer holder has taken the lease over: stop, and do not retry with this token.",
        )
    } else {
        (
            format!("stale fencing token {presented}: it was released or revoked"),
            "Adopt the number of a new grant. After a mistake: lease_revoke, then lease_forget.",
        )
    };
    Report::new(SqlState::StaleToken, message, hint).detailed(|d| {
        d.lease = Some(to_utf8(name));
        (d.presented, d.stored) = (Some(presented), Some(stored));
    })
}

/// 42501: the name has none of the role's prefixes.
pub fn name_not_given<'a>(
    lease: &[u8],
    role: &[u8],
    prefixes: impl Iterator<Item = &'a [u8]>,
) -> Report {
    /// The number of prefixes that the hint names; further ones are only counted.
    const NAMED: usize = 10;
    let prefixes: Vec<&[u8]> = prefixes.collect();
    let mut named: Vec<String> = prefixes.iter().take(NAMED).map(|p| quoted(p)).collect();
    if prefixes.len() > NAMED {
        named.push(format!("{} more", prefixes.len() - NAMED));
    }
    let role = to_utf8(role);
    let hint = if named.is_empty() {
        format!(
            "Role \"{role}\" may take no lease yet: an administrator gives it names by fence_grant."
        )
    } else {
        format!("Role \"{role}\" may take names that begin with {}.", named.join(" or "))
    };
    Report::new(
        SqlState::InsufficientPrivilege,
        format!("{} is not for this role", lease_in_words(Some(lease))),
        hint,
    )
    .detailed(|d| {
        d.lease = Some(to_utf8(lease));
        d.role = Some(role);
    })
}

/// The warning 01000: the SQL objects are of another version than the library.
pub fn other_version(library: &str, sql: &str) -> Report {
    Report::new(
        SqlState::Warning,
        format!("the library of pg_fence is {library}, its SQL objects are {sql}"),
        format!(
            "Run ALTER EXTENSION pg_fence UPDATE TO '{library}', or install the library of {sql} and reconnect."
        ),
    )
}

/// XX001: the page of one of the extension's sequences is damaged.
pub fn damaged_sequence(sequence: &str, unlogged: bool) -> Report {
    let hint = match unlogged {
        true => format!("Nothing of worth is lost. Make it anew: {}", anew(sequence)),
        false => "Restore the database from a backup.".into(),
    };
    let message = format!("the page of sequence {sequence} is damaged");
    Report::new(SqlState::DataCorrupted, message, hint)
        .detailed(|d| d.relation = Some(sequence.to_owned()))
}

/// The statements that replace one of the extension's unlogged sequences.
fn anew(sequence: &str) -> String {
    format!(
        "BEGIN; ALTER EXTENSION pg_fence DROP SEQUENCE {sequence}; DROP SEQUENCE {sequence}; CREATE UNLOGGED SEQUENCE {sequence} CACHE 1; ALTER EXTENSION pg_fence ADD SEQUENCE {sequence}; COMMIT"
    )
}

/// 55000: a relation of the extension is missing.
pub fn state_missing(relation: &str) -> Report {
    missing(format!("fence.{relation}"))
}

/// 55000: the extension was dropped while the call waited.
pub fn dropped() -> Report {
    Report::new(
        SqlState::ObjectNotInPrerequisiteState,
        "pg_fence was dropped, or its state made anew, while this call waited".into(),
        "Nothing was granted or changed. Where the extension is there again, call again.",
    )
}

/// 55000: a function of the extension is missing.
pub fn function_missing(function: &str) -> Report {
    missing(format!("function {function}() of its own"))
}

fn missing(what: String) -> Report {
    Report::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!("pg_fence finds no {what}"),
        "Either it was renamed or moved: give it its name and its place back. Or the library and the SQL objects are of different versions: run ALTER EXTENSION pg_fence UPDATE, or CREATE EXTENSION pg_fence.",
    )
}

/// 55000: a table of the extension has other columns than the library expects.
pub fn state_differs(table: &str) -> Report {
    Report::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!("fence.{table} is not as this library of pg_fence knows it"),
        "Either its columns, its primary key or its access method were altered: put them back. Or the library and the SQL objects are of different versions: install the newer library and reconnect, or run ALTER EXTENSION pg_fence UPDATE.",
    )
    .detailed(|d| d.relation = Some(format!("fence.{table}")))
}

/// 55000: a table of the extension has an added object that its writes would bypass.
pub fn state_extended(table: &str, addition: &str) -> Report {
    Report::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!("fence.{table} has {addition}, which a write by pg_fence would pass over"),
        "pg_fence writes this table as PostgreSQL writes its catalogs. Drop what was added, or disable it if it is a trigger; fence_audit() names it.",
    )
    .detailed(|d| d.relation = Some(format!("fence.{table}")))
}

/// 55000: the token sequence was altered.
pub fn sequence_altered(what: &str) -> Report {
    Report::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!("fence.token_seq {what}, so its values are no fencing tokens"),
        "Mend it: ALTER SEQUENCE fence.token_seq INCREMENT 1 CACHE 1 NO CYCLE; and ALTER SEQUENCE fence.token_seq SET LOGGED where it is unlogged. Commit that first.",
    )
}

/// 55000: the next epoch would exceed the positive bigints.
pub fn tokens_exhausted() -> Report {
    Report::new(
        SqlState::ObjectNotInPrerequisiteState,
        "fence.token_seq is exhausted".into(),
        "Somebody has set it near the end of bigint. Stop the workers, DROP EXTENSION pg_fence CASCADE, CREATE EXTENSION pg_fence, call fence_grant and fence_protect again, and run the remedies of fence_audit(). No lease outlives that.",
    )
}

/// The log line 53200: statistics are not counted in a database.
pub fn not_counted(database: &[u8], why: &str) -> Report {
    Report::new(
        SqlState::OutOfMemory,
        format!("pg_fence does not count in database {}: {why}", quoted(database)),
        "fence.stats and fence.refusals miss what happens now; it is tried again each minute. Give the server more shared memory (a container: --shm-size), lower pg_fence.refusals_kept, or switch pg_fence.statistics off.",
    )
}

// Errors of fenced writes ---------------------------------------------------------------------------------

/// PF001: the token is stale. Either token is `None` if the caller may not know it.
pub fn stale(presented: Option<Token>, stored: Option<Token>, hint: String) -> Report {
    let message = match (presented, stored) {
        (Some(presented), Some(stored)) if presented == stored => {
            format!("stale fencing token: the row has already been written with token {stored}")
        }
        (Some(presented), Some(stored)) => {
            format!("stale fencing token {presented}: the row has already seen {stored}")
        }
        (Some(presented), None) => {
            format!("stale fencing token {presented}: the row has seen the same or a greater one")
        }
        (None, _) => "stale fencing token: the row has seen the same or a greater one".into(),
    };
    Report::new(SqlState::StaleToken, message, hint).detailed(|d| {
        d.presented = presented;
        d.stored = stored;
    })
}

/// PF002: no token or NULL was presented. `lease` is the row's lease, if the caller may know it.
pub fn unfenced(stored: Option<Token>, lease: Option<&[u8]>, hint: String) -> Report {
    Report::new(SqlState::NoToken, "no fencing token presented".into(), hint).detailed(|d| {
        d.stored = stored;
        d.lease = lease.map(to_utf8);
    })
}

/// PF003: the token was never issued.
pub fn never_issued(presented: Token, hint: String) -> Report {
    Report::new(
        SqlState::TokenNeverIssued,
        format!("fencing token {presented} was never issued by this database"),
        hint,
    )
    .detailed(|d| d.presented = Some(presented))
}

/// PF004: the token does not speak for the lease. Either is `None` if the caller may not know it.
pub fn not_speaking(lease: Option<&[u8]>, presented: Option<Token>) -> Report {
    let token = presented.map_or(String::new(), |token| format!(" {token}"));
    Report::new(
        SqlState::TokenDoesNotSpeak,
        format!("fencing token{token} does not speak for {}", lease_in_words(lease)),
        "The lease was never granted with this token, or has expired, been released, revoked or taken over: stop, and acquire it again.",
    )
    .detailed(|d| {
        d.presented = presented;
        d.lease = lease.map(to_utf8);
    })
}

/// PF004: another holder has adopted the number, and both holders have names.
pub fn of_another_holder(lease: &[u8], presented: Token) -> Report {
    Report::new(
        SqlState::TokenDoesNotSpeak,
        format!("fencing token {presented} of {} is another holder's", lease_in_words(Some(lease))),
        "One number has one holder. The lock service has granted it twice, or it was read from somebody else's grant: stop, give the lock back there, and get a new number.",
    )
    .detailed(|d| {
        d.presented = Some(presented);
        d.lease = Some(to_utf8(lease));
    })
}

/// Adds to PF004 that a renewal helps, because only a new epoch keeps the token from speaking.
pub fn renew_first(not_speaking: Report) -> Report {
    let hint = "The lease is still this token's, but the database has failed over, or been restored or copied, since the grant was last renewed: call lease_renew with this token, and go on with the one it returns. NULL means that the lease is lost: stop.";
    Report { hint: hint.into(), ..not_speaking }.detailed(|d| d.renew_first = Some(true))
}

/// Adds to PF004 that another adoption of the same number helps, because only a new epoch keeps it from speaking.
pub fn adopt_again(not_speaking: Report) -> Report {
    let hint = "The number is still the lease's, but the database has failed over, or been restored or copied, since it was adopted: call lease_adopt with it again.";
    Report { hint: hint.into(), ..not_speaking }
}

/// PF005: TRUNCATE presents no token and fires no row triggers.
pub fn unfenceable() -> Report {
    Report::new(
        SqlState::CannotBeFenced,
        "TRUNCATE cannot be fenced: it shows no token".into(),
        "Use DELETE with a token, or let the owner call fence_unprotect, truncate and fence_protect in one transaction.",
    )
}

/// A row lease, as far as an error about it may show it.
pub struct RowLease {
    /// The token that the statement presented; `None` if it presented none, or the caller may not know it.
    pub presented: Option<Token>,
    /// The row's token; `None` if the caller may not read it.
    pub stored: Option<Token>,
    /// The row's deadline, ISO 8601 in UTC; `None` if it has none, or the caller may not read it.
    pub expires_at: Option<String>,
    /// The name of the fence column.
    pub fence: Vec<u8>,
    /// The name of the deadline column.
    pub deadline: Vec<u8>,
    /// True if only the setting presents a token.
    pub managed: bool,
}

/// The errors of row leases: PF001, PF002, PF004, PF006 and 22023.
pub fn of_row_lease(reason: Reason, row: RowLease) -> Report {
    let token = row.presented.map_or(String::new(), |token| format!(" {token}"));
    let not_the_rows = format!("fencing token{token} does not speak for the row");
    let (fence, deadline) = (identifier(&row.fence), identifier(&row.deadline));
    let claim = "claim the row anew, or stop";
    let (sqlstate, message, hint) = match reason {
        Reason::Stale => {
            let hint =
                "Somebody has claimed the row since: stop, and do not retry with this token.";
            return stale(row.presented, row.stored, hint.into())
                .detailed(|d| d.expires_at = row.expires_at);
        }
        Reason::Held => (
            SqlState::RowIsHeld,
            format!(
                "the row is held{}, and its token was not presented",
                row.expires_at.as_ref().map_or(String::new(), |at| format!(" until {at}"))
            ),
            match row.managed {
                true => format!(
                    "Its holder shows the row's token by SET LOCAL pg_fence.token. Others wait for the deadline, or evict the holder by the row's token: SET {deadline} = NULL."
                ),
                false => format!(
                    "Its holder shows the row's token in column {fence} (a DELETE by pg_fence.token). Others wait for the deadline, or evict the holder: SET {deadline} = NULL, {fence} = {fence}."
                ),
            },
        ),
        Reason::GivenUp => (
            SqlState::TokenDoesNotSpeak,
            not_the_rows + ", which nobody holds",
            format!(
                "The row was given up, or its holder was evicted, or somebody has written it after its deadline: {claim}."
            ),
        ),
        Reason::LateRenewal => (
            SqlState::TokenDoesNotSpeak,
            format!("fencing token{token} can no longer renew the row"),
            format!(
                "The deadline has passed: {claim}. Until somebody else writes the row, a write that leaves {deadline} alone still lands. To keep the work: claim it without {fence} in SET, WHERE {fence} = its token AND {deadline} IS NOT NULL."
            ),
        ),
        Reason::OldCopy => (
            SqlState::TokenDoesNotSpeak,
            "the statement writes back an old copy of the row".into(),
            format!(
                "The statement writes an older value of column {fence} back, so somebody has claimed the row since it was read. Read the row again; who holds it sets pg_fence.token."
            ),
        ),
        Reason::PastDeadline => (
            SqlState::InvalidParameterValue,
            format!("the deadline in column {} has passed", quoted(&row.deadline)),
            format!(
                "Nothing was claimed. Compute the deadline from clock_timestamp() in the statement itself, or try again; to give a row up, SET {deadline} = NULL."
            ),
        ),
        Reason::OtherClaim | Reason::NoToken | Reason::NeverIssued => (
            SqlState::TokenDoesNotSpeak,
            not_the_rows,
            format!(
                "The token is of another row's claim, or of a lease: show the one that the claim of this row has returned, or {claim}."
            ),
        ),
    };
    Report::new(sqlstate, message, hint).detailed(|d| {
        d.presented = row.presented;
        d.stored = row.stored;
        d.expires_at = row.expires_at;
    })
}

/// PF003: the fence of a claimed row is not smaller than the token drawn for the claim.
pub fn row_is_ahead(stored: Option<Token>) -> Report {
    let number = stored.map_or(String::new(), |token| format!(" {token}"));
    Report::new(
        SqlState::TokenNeverIssued,
        format!("the row's fence{number} was never issued by this database"),
        "fence_new_epoch() makes the sequence outrun tokens issued elsewhere. Where the number is near the end of bigint, no token is greater: DELETE the row and INSERT it again.",
    )
    .detailed(|d| d.stored = stored)
}

/// PF002 or PF001: a later BEFORE trigger has changed the fence.
pub fn changed_behind(stored: Option<Token>) -> Report {
    let (sqlstate, value) = match stored {
        None => (SqlState::NoToken, "NULL".to_owned()),
        Some(token) => (SqlState::StaleToken, token.to_string()),
    };
    Report::new(
        sqlstate,
        format!("a later BEFORE trigger changed the row's fence to {value}, which this transaction did not present"),
        "Make the other trigger leave the fence column alone.",
    )
    .detailed(|d| d.presented = stored)
}

/// 39P01: the trigger cannot work in this place.
pub fn misplaced(message: &'static str) -> Report {
    Report::new(
        SqlState::TriggerProtocolViolated,
        message.into(),
        "CREATE TRIGGER fenced BEFORE INSERT OR UPDATE OR DELETE ON my_table FOR EACH ROW EXECUTE FUNCTION fenced(); or call fence_protect.",
    )
}

/// 22023: an argument of the trigger is invalid.
pub fn bad_trigger_argument(message: String) -> Report {
    Report::new(
        SqlState::InvalidParameterValue,
        message,
        "fenced(fence_column, mode, lease, deadline): the column's name; strict, monotonic or managed; a lease's name with {column} placeholders; or the name of the deadline column of a table whose rows are their own leases.",
    )
}

/// 42703: the table lacks a column.
pub fn no_column(column: &[u8]) -> Report {
    Report::new(
        SqlState::UndefinedColumn,
        format!("the trigger fenced finds no column {}", quoted(column)),
        "Was it renamed or dropped? Call fence_protect again with the present name; until then no write can land.",
    )
    .detailed(|d| d.column = Some(to_utf8(column)))
}

/// 42804: a column has the wrong type.
pub fn wrong_type(column: &[u8], wanted: &str) -> Report {
    Report::new(
        SqlState::DatatypeMismatch,
        format!("column {} must be {wanted} to serve the trigger fenced", quoted(column)),
        "Tokens are bigint, a deadline is timestamptz; a lease's name is made of columns whose text no setting can change.",
    )
    .detailed(|d| d.column = Some(to_utf8(column)))
}

/// 22004: the column of a placeholder is NULL.
pub fn null_placeholder(column: &[u8]) -> Report {
    Report::new(
        SqlState::NullValueNotAllowed,
        format!("column {} is NULL, so the row names no lease", quoted(column)),
        "Give it a value. Rows that have none can be mended by the table's owner, in one transaction: fence_unprotect, UPDATE or DELETE, ALTER COLUMN ... SET NOT NULL, fence_protect with the arguments that the table had.",
    )
    .detailed(|d| d.column = Some(to_utf8(column)))
}

/// 22023: the lease's name made from a row is too long or empty.
pub fn unfit_lease_name() -> Report {
    Report::new(
        SqlState::InvalidParameterValue,
        "the row's columns make no lease name of 1 to 512 bytes".into(),
        "Bind the table to a lease by shorter columns.",
    )
}
