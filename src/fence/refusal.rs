//! The errors of refused writes, and what they may show.
//!
//! An error names the lease and the tokens only as far as the writer may know them; administrators see all in
//! fence.refusals.

use super::binding::WriteLeases;
use super::plan::Plan;
use crate::errors::{self, Report, SqlState};
use crate::leases::guard;
use crate::leases::lookup::{self, Caller, Disclosure};
use crate::pg::fenced_table::describe;
use crate::pg::fenced_table::trigger::{Attribute, TriggerCall, Tuple};
use crate::pg::state::role_prefix;
use crate::statistics::RefusalFacts;
use crate::tokens;
use pg_fence_rules::Token;
use pg_fence_rules::fence::{Verdict, Write};

/// A write that is refused.
pub struct RefusedWrite<'a> {
    pub call: &'a TriggerCall,
    pub plan: &'a Plan,
    pub write: Write,
}

impl RefusedWrite<'_> {
    /// The error of a write that was refused by its token alone: PF003 instead of PF001 if the token was never issued.
    /// (In strict mode a statement that names the column with the row's own value presents nothing: PF001.)
    #[cold]
    pub fn checked(&self, leases: &WriteLeases, verdict: Verdict) -> Report {
        self.error(match verdict {
            Verdict::Stale { presented, .. }
                if self.presents() && self.is_never_issued(leases, presented) =>
            {
                Verdict::NeverIssued { presented }
            }
            verdict => verdict,
        })
    }

    /// The error of a write whose token does not speak for a lease of the row: PF003 if the token was never issued,
    /// PF001 if the row has a greater one, and otherwise the error of the guard.
    #[cold]
    pub fn unguarded(&self, leases: &WriteLeases, token: Token, unguarded: Report) -> Report {
        let is_lost = unguarded.sqlstate == SqlState::TokenDoesNotSpeak
            // If a renewal helps, the writer must be told that.
            && unguarded.details.renew_first.is_none();
        match self.write.old.flatten() {
            _ if !is_lost => unguarded,
            _ if self.is_never_issued(leases, token) => {
                self.error(Verdict::NeverIssued { presented: token })
            }
            Some(stored) if stored > token => {
                self.error(Verdict::Stale { presented: token, stored })
            }
            _ => unguarded,
        }
    }

    /// The error of this verdict.
    #[cold]
    pub fn error(&self, verdict: Verdict) -> Report {
        let RefusedWrite { call, plan, ref write } = *self;
        let (stored, leases) = (visible(call, plan, write.old.flatten()), self.leases());
        let lease = leases.iter().next();
        match verdict {
            // To a writer that may not see the lease, an unissued token is answered like any other that does not speak.
            Verdict::NeverIssued { presented } => {
                match lease.filter(|name| !role_prefix::may_be_named_in_errors(name)) {
                    Some(name) => lookup::not_speaking(
                        name,
                        presented,
                        Caller::Trigger(&|| self.disclosure()),
                    ),
                    None => {
                        let hint = self.hint_of_never_issued(presented, stored);
                        errors::never_issued(presented, hint)
                    }
                }
            }
            Verdict::Stale { presented, .. } => {
                // If the statement only names the column, the writer may not know the value that it presents.
                let is_known = self.presents() || stored.is_some();
                let presented = is_known.then_some(presented);
                errors::stale(presented, stored, self.hint_of_stale(presented, stored))
            }
            _ => {
                let lease = lease.filter(|_| may_see_lease(call, plan));
                errors::unfenced(stored, lease, self.hint_of_unfenced(lease))
            }
        }
    }

    /// What the writer may know of the lease and the token in question.
    pub fn disclosure(&self) -> Disclosure {
        disclosure(self.call, self.plan, self.presents())
    }

    /// Returns true if the statement or the transaction has presented the token itself, so that its writer knows it.
    fn presents(&self) -> bool {
        self.write.column_presents() || self.write.ambient.is_some()
    }

    /// Returns true if the token was neither drawn here nor adopted for one of these leases.
    fn is_never_issued(&self, leases: &WriteLeases, token: Token) -> bool {
        !tokens::issued(self.plan.tokens, token) && !leases.iter().any(lookup::is_adopted)
    }

    /// The leases of the write; none if their names cannot be made.
    pub fn leases(&self) -> WriteLeases<'_> {
        leases(self.call, self.plan)
    }
}

/// The facts about a refused write for administrators, whatever its writer may know.
#[cold]
pub fn facts(call: &TriggerCall, plan: &Plan, report: &Report) -> RefusalFacts {
    let fence = |row: Tuple| call.columns.token(row, &plan.column);
    let stored = call.old.and_then(fence);
    let presented = call.new.and_then(fence).filter(|_| report.sqlstate != SqlState::NoToken);
    let leases = leases(call, plan);
    // Of two leases, this is the one for which the token does not speak.
    let stands = |name: &&[u8]| presented.is_some_and(|token| guard::is_guarded_here(name, token));
    let lease = leases.iter().find(|name| !stands(name)).or(leases.iter().next());
    let lease = lease.map(<[u8]>::to_vec);
    let holder = lease.as_deref().and_then(lookup::holder);
    RefusalFacts { key: describe::key(call), lease, holder, presented, stored }
}

/// The leases of a write; none if their names cannot be made.
fn leases<'a>(call: &TriggerCall, plan: &'a Plan) -> WriteLeases<'a> {
    let leases =
        plan.lease.as_ref().map(|binding| binding.leases(&call.columns, call.old, call.new));
    leases.and_then(Result::ok).unwrap_or_default()
}

/// What the writer may know of the lease and the token in question. `presents` is true if it has presented the token
/// itself.
#[cold]
pub fn disclosure(call: &TriggerCall, plan: &Plan, presents: bool) -> Disclosure {
    let token = presents || describe::readable(call, plan.column.number);
    Disclosure { lease: may_see_lease(call, plan), token }
}

/// Returns true if the caller may read the columns in the name of the row's lease.
fn may_see_lease(call: &TriggerCall, plan: &Plan) -> bool {
    let readable = |attribute: &Attribute| describe::readable(call, attribute.number);
    plan.lease.as_ref().is_none_or(|binding| binding.columns().all(readable))
}

/// The stored token, if the caller may read it.
pub fn visible(call: &TriggerCall, plan: &Plan, stored: Option<Token>) -> Option<Token> {
    stored.filter(|_| describe::readable(call, plan.column.number))
}
