//! The fence of a table with row leases: finds the token that a statement presents to a row, applies the rule, and
//! draws the token of a claim.

use super::plan::Plan;
use super::refusal::{self, RefusedWrite};
use super::{replica, row_moves};
use crate::errors::{self, Report, RowLease};
use crate::leases::guard;
use crate::pg::fenced_table::describe;
use crate::pg::fenced_table::trigger::{Attribute, Event, TriggerCall, Tuple};
use crate::pg::session::{clock, settings};
use crate::statistics::{self, Counter};
use crate::tokens;
use pg_fence_rules::fence::{self, Landing};
use pg_fence_rules::row_lease::{self, Presented, Reason, Stored, Verdict, Write};
use pg_fence_rules::{Instant, TTL_MAX, Token};
use pgrx::pg_sys;

/// A write of a row, with what the trigger knows of its table.
struct RowWrite<'a> {
    call: &'a TriggerCall,
    plan: &'a Plan,
    deadline: &'a Attribute,
    managed: bool,
    /// The time of the decision, read under the row's lock.
    now: Instant,
}

/// The two columns of a row, read once: finding a column after others of variable length walks through all of them.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Columns {
    fence: Option<Token>,
    deadline: Option<Instant>,
}

/// Decides about a row before it is written. Errors: PF001 to PF004, PF006, 22023, 55000.
pub fn before(
    call: &TriggerCall,
    plan: &Plan,
    deadline: &Attribute,
    managed: bool,
) -> Result<pg_sys::Datum, Report> {
    if settings::is_replica() {
        statistics::checked_row();
        return replica::check(call, plan, order_of(call, plan));
    }
    let is_half_of_move = plan.moves && is_half_of_move(call, plan);
    if !is_half_of_move {
        statistics::checked_row();
    }
    let write = RowWrite { call, plan, deadline, managed, now: clock::now() };
    match (call.old, call.new) {
        // The UPDATE decided about the deadline; a trigger of the new partition must not change it.
        (None, Some(new)) if is_half_of_move => {
            let brought = write.columns(new);
            let lands = Columns { deadline: row_moves::deadline(plan.depth), ..brought };
            Ok(write.landed(new, brought, lands))
        }
        (_, new) if is_half_of_move => Ok(call.pass(new.or(call.old))),
        (None, Some(new)) => write.insert(new),
        (Some(old), new) => write.change(old, new),
        (None, None) => Ok(call.pass(None)),
    }
}

/// The write in the terms of the order check.
fn order_of(call: &TriggerCall, plan: &Plan) -> fence::Write {
    let fence = |row| call.columns.token(row, &plan.column);
    let named = plan.names_fence(call);
    fence::Write { old: call.old.map(fence), new: call.new.map(fence), named, ambient: None }
}

/// Returns true for the DELETE or the INSERT by which an UPDATE moves a row to another partition. The UPDATE was
/// checked.
fn is_half_of_move(call: &TriggerCall, plan: &Plan) -> bool {
    match (call.event, call.old, call.new) {
        (Event::Delete, Some(old), _) => {
            row_moves::leaves(plan.depth, old.id(call), plan.sees_arriving)
        }
        (Event::Insert, _, Some(new)) => {
            let fence = call.columns.token(new, &plan.column).unwrap_or(Token::BEFORE_ALL);
            row_moves::take_under_way(plan.depth).is_some_and(|landing| landing.fence == fence)
        }
        _ => false,
    }
}

impl RowWrite<'_> {
    fn columns(&self, row: Tuple) -> Columns {
        Columns {
            fence: self.call.columns.token(row, &self.plan.column),
            deadline: self.call.columns.instant(row, self.deadline),
        }
    }

    /// Inserts a row, which presents no token. A fence in the row is an error, so that it is not overwritten unnoticed.
    fn insert(&self, new: Tuple) -> Result<pg_sys::Datum, Report> {
        let brought = self.columns(new);
        if brought.fence.is_some_and(|fence| fence > Token::BEFORE_ALL) {
            return Err(self.as_refused().error(fence::Verdict::Unfenced));
        }
        match row_lease::check_insert(brought.deadline, self.now) {
            Verdict::Claim(deadline) => {
                self.check_reach(deadline)?;
                let token = self.claim(None)?;
                Ok(self.landed(
                    new,
                    brought,
                    Columns { fence: Some(token), deadline: Some(deadline) },
                ))
            }
            Verdict::Land(deadline) => {
                Ok(self.landed(new, brought, Columns { fence: None, deadline }))
            }
            Verdict::Refused(reason) => Err(self.refused(reason, None, None)),
        }
    }

    fn change(&self, old: Tuple, new: Option<Tuple>) -> Result<pg_sys::Datum, Report> {
        let is_own = old.is_own();
        let Columns { fence, deadline } = self.columns(old);
        let stored = Stored { fence, deadline, is_own };
        let brought = new.map(|new| self.columns(new));
        let presented = self.presented(&stored, brought);
        let new_deadline = brought.map(|brought| brought.deadline);
        let write = Write { old: stored, presented, new_deadline };
        let issued = |token| tokens::issued(self.plan.tokens, token);
        let (fence, deadline) = match row_lease::check(&write, self.now, issued) {
            Verdict::Refused(reason) => {
                let token = match presented {
                    Presented::Token(token) => Some(token),
                    _ => None,
                };
                return Err(self.refused(reason, token, Some(&stored)));
            }
            Verdict::Claim(deadline) => {
                self.check_reach(deadline)?;
                (Some(self.claim(Some(&stored))?), Some(deadline))
            }
            Verdict::Land(deadline) => {
                if let Some(later) = deadline.filter(|_| deadline > stored.deadline) {
                    self.check_reach(later)?;
                }
                (stored.fence, deadline)
            }
        };
        if self.plan.moves && self.call.event == Event::Update {
            let token = fence.unwrap_or(Token::BEFORE_ALL);
            let landing = Landing { token, fence: token };
            row_moves::accept_held(self.plan.depth, old.id(self.call), landing, deadline);
        }
        Ok(match new.zip(brought) {
            Some((new, brought)) => self.landed(new, brought, Columns { fence, deadline }),
            None => self.call.pass(Some(old)),
        })
    }

    /// The token that the statement presents, in the fence column or by the setting. A guard's token does not count.
    fn presented(&self, stored: &Stored, brought: Option<Columns>) -> Presented {
        let Some(brought) = brought.filter(|_| !self.managed) else {
            let is_old_copy = |brought: Columns| {
                self.call.names(&self.plan.column) && brought.fence != stored.fence
            };
            // lease_guard has put its token into the setting as well.
            return match settings::token().filter(|token| !guard::is_guarding_with(*token)) {
                Some(token) => Presented::Token(token),
                None if brought.is_some_and(is_old_copy) => Presented::OldCopy,
                None => Presented::Nothing,
            };
        };
        match brought.fence {
            // A column that the statement does not name has the stored value, or one from another trigger.
            _ if !self.call.names(&self.plan.column) => Presented::Nothing,
            Some(token) => Presented::Token(token),
            None => Presented::Null,
        }
    }

    /// Draws the token of a claim. The row's number is not passed to `draw`, because a client may have made it up: it
    /// must neither advance the sequence nor stay in this session's memory.
    fn claim(&self, stored: Option<&Stored>) -> Result<Token, Report> {
        let token = tokens::draw(Token::BEFORE_ALL)?;
        let fence = stored.and_then(|stored| stored.fence);
        if fence.is_some_and(|fence| fence >= token) {
            return Err(errors::row_is_ahead(refusal::visible(self.call, self.plan, fence)));
        }
        statistics::count(Counter::RowClaims);
        if stored.is_some_and(|stored| stored.is_over(self.now)) {
            statistics::count(Counter::RowTakeOvers);
        }
        Ok(token)
    }

    /// Errors if the deadline is further ahead than the longest ttl.
    fn check_reach(&self, deadline: Instant) -> Result<(), Report> {
        let ttl = deadline.since(self.now);
        if ttl > TTL_MAX {
            return Err(errors::bad_argument(
                "deadline",
                "a deadline may be at most 366 days ahead",
                "A heartbeat renews each third of the ttl; usual is clock_timestamp() + '30 s'.",
            ));
        }
        settings::check_ttl("deadline", ttl)
    }

    /// Returns the row with the columns `lands`; `brought` are those that the statement gave it.
    fn landed(&self, row: Tuple, brought: Columns, lands: Columns) -> pg_sys::Datum {
        if brought == lands {
            return self.call.pass(Some(row));
        }
        let fence = (&self.plan.column, lands.fence.map(Token::bigint));
        let deadline = (self.deadline, lands.deadline.map(Instant::micros));
        self.call.pass(Some(self.call.with_values(row, [fence, deadline])))
    }

    #[cold]
    fn refused(&self, reason: Reason, presented: Option<Token>, stored: Option<&Stored>) -> Report {
        let fence = stored.and_then(|stored| stored.fence);
        let visible = refusal::visible(self.call, self.plan, fence);
        // A statement that copies the column may present a token that its writer cannot read.
        let presented = presented.filter(|_| presented != fence || visible.is_some());
        let readable = describe::readable(self.call, self.deadline.number);
        let row = RowLease {
            presented,
            stored: visible,
            expires_at: stored
                .and_then(|stored| stored.deadline)
                .filter(|_| readable)
                .map(clock::iso),
            deadline: describe::column_name(self.call, self.deadline.number),
            fence: describe::column_name(self.call, self.plan.column.number),
            managed: self.managed,
        };
        match (reason, presented) {
            (Reason::NeverIssued, Some(presented)) => {
                self.as_refused().error(fence::Verdict::NeverIssued { presented })
            }
            (Reason::NoToken, _) => self.as_refused().error(fence::Verdict::Unfenced),
            _ => errors::of_row_lease(reason, row),
        }
    }

    /// The refused write in the terms of the other fences, whose errors PF002 and PF003 it shares.
    fn as_refused(&self) -> RefusedWrite<'_> {
        let RowWrite { call, plan, .. } = *self;
        RefusedWrite { call, plan, write: order_of(call, plan) }
    }
}
