//! fence.guarded_commits: that a guarded transaction has committed, for those whose snapshots do not see what
//! it wrote. Rows of their own, not new versions of the grant's, so that they are in nobody's way.
//!
//! A lease has as many rows as guarded transactions of it have ever committed at the same time. Each commit
//! writes over one that no other open transaction writes: its key stays, so the update is a HOT one.

use crate::pg::call::args::text_datum;
use crate::pg::call::errors::Refusal;
use crate::pg::compat;
use crate::pg::locks::lock::LockTag;
use crate::pg::locks::relation_lock::Wait;
use crate::pg::raw;
use crate::pg::session::xact;
use crate::pg::state::form::Spec;
use crate::pg::state::keyed::{Access, Keyed};
use crate::pg::state::row::{Deleter, Fields};
use crate::pg::state::row_version::RowVersion;
use pg_fence_rules::locks::{Lock, NOTE_COMMIT};
use pgrx::pg_sys;

static SPEC: Spec = Spec {
    table: c"guarded_commits",
    index: c"guarded_commits_pkey",
    columns: &[(pg_sys::TEXTOID, false), (pg_sys::INT4OID, false), (pg_sys::XID8OID, false)],
    number: 1,
};

/// A row: that a transaction which guarded the lease has committed.
struct Note {
    entry: i32,
    version: RowVersion,
    /// This transaction wrote it.
    own: bool,
    deleter: Deleter,
    tuple: pg_sys::HeapTuple,
}

/// Notes that this transaction, which guards the lease, commits.
pub fn note(name: &[u8]) -> Result<(), Refusal> {
    let Some(table) = Table::open(Access::Write, Wait::Queue)? else { return Ok(()) };
    for entry in 0.. {
        // Whoever commits at the same time has an entry of its own: nobody waits.
        let lock = LockTag::new(Lock::GuardedCommit, name, entry);
        if lock.take(NOTE_COMMIT.mode, NOTE_COMMIT.waits)? && table.write(name, entry)? {
            break;
        }
    }
    Ok(())
}

/// Forgets a lease, as far as nobody is just writing.
pub fn forget(name: &[u8]) -> Result<(), Refusal> {
    let Some(table) = Table::open(Access::Write, Wait::Never)? else { return Ok(()) };
    for note in table.notes(name, AsSeen::Now) {
        // The lock is given back at once, for there may be millions: who commits sees the deletion.
        let lock = LockTag::new(Lock::GuardedCommit, name, note.entry);
        if lock.take(NOTE_COMMIT.mode, NOTE_COMMIT.waits)? {
            let there = table.at(name, note.entry);
            if let Some(note) = there.filter(|note| note.deleter == Deleter::None) {
                table.0.delete(note.version);
                xact::see_own_changes();
            }
            lock.give(NOTE_COMMIT.mode);
        }
    }
    Ok(())
}

/// Is there one that the transaction's snapshot does not see? Also where that cannot be told now, because
/// maintenance waits for the table.
pub fn is_newer_than_snapshot(name: &[u8]) -> Result<bool, Refusal> {
    let Some(table) = Table::open(Access::Read, Wait::Holders)? else { return Ok(true) };
    let now = table.notes(name, AsSeen::Now);
    let then = table.notes(name, AsSeen::ByTransaction);
    Ok(now.iter().any(|note| !note.own && !then.iter().any(|seen| seen.version == note.version)))
}

#[derive(Clone, Copy)]
enum AsSeen {
    Now,
    ByTransaction,
}

struct Table(Keyed);

impl Table {
    fn open(access: Access, wait: Wait) -> Result<Option<Self>, Refusal> {
        let opened = Keyed::open(&SPEC, access, wait)?;
        Ok(opened.filter(|table| table.open_index(wait)).map(Table))
    }

    /// Writes an entry whose lock is held; false where a prune is just deleting that row.
    fn write(&self, name: &[u8], entry: i32) -> Result<bool, Refusal> {
        let mut key = Fields::empty();
        key.set_at(0, text_datum(name)).set_at(1, entry);
        let mut fields = key.unnamed();
        fields.set_at(2, xact::id());
        loop {
            match self.at(name, entry) {
                None => self.0.insert(&fields),
                Some(note) if note.own => return Ok(true),
                Some(note) => match note.deleter {
                    Deleter::None => self.0.update(note.version, &self.over(&fields, &note)),
                    Deleter::Open => return Ok(false),
                    Deleter::Committed => continue,
                },
            }
            xact::see_own_changes();
            let stands = |note: &Note| {
                // SAFETY: a copied row of this table.
                note.own && unsafe { self.0.holds(note.tuple, &fields) }
            };
            if self.0.has_triggers() && !self.at(name, entry).is_some_and(|note| stands(&note)) {
                return Err(self.0.meddled());
            }
            return Ok(true);
        }
    }

    /// The fields over a row that is there: columns that were added stay as they are.
    fn over(&self, fields: &Fields, note: &Note) -> Fields {
        // SAFETY: a copied row of this table.
        let there = unsafe { Fields::of(note.tuple, self.0.row_type()) };
        fields.with_rest_of(&there, SPEC.columns.len())
    }

    /// The note of that number, where there is one.
    fn at(&self, name: &[u8], entry: i32) -> Option<Note> {
        self.notes(name, AsSeen::Now).into_iter().find(|note| note.entry == entry)
    }

    fn notes(&self, name: &[u8], as_seen: AsSeen) -> Vec<Note> {
        let mut tuples = Vec::new();
        let name = text_datum(name);
        // SAFETY: the snapshot is registered for as long as the scan runs; each tuple is copied while its page is
        // locked.
        unsafe {
            compat::guarded(|| {
                let snapshot = raw::RegisterSnapshot(match as_seen {
                    AsSeen::Now => raw::GetLatestSnapshot(),
                    AsSeen::ByTransaction => raw::GetTransactionSnapshot(),
                });
                self.0.each(name, snapshot, |tuple, _| tuples.push(raw::heap_copytuple(tuple)));
                raw::UnregisterSnapshot(snapshot);
            });
        }
        tuples.into_iter().map(|tuple| self.note(tuple)).collect()
    }

    fn note(&self, tuple: pg_sys::HeapTuple) -> Note {
        let mut null = false;
        // SAFETY: a copied row of this table, whose second column is a number.
        unsafe {
            let entry = pg_sys::heap_getattr(tuple, 2, self.0.row_type(), &mut null);
            Note {
                entry: entry.value() as i32,
                version: RowVersion::of(tuple),
                own: xact::is_own(tuple),
                deleter: Deleter::of(tuple),
                tuple,
            }
        }
    }
}
