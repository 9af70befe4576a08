//! Calls that are one evaluation of a row, and its repetition.
//!
//! At READ COMMITTED a row that another transaction has changed meanwhile is evaluated anew (EvalPlanQual): the expressions
//! of the query a second time, in a state of their own, whose memory is below the query's. So the same expression, called
//! from memory below, is a repetition; called from the same memory, it is a further row. (The planner copies an expression
//! that it puts into two places, and MERGE repeats its actions in the query's own memory: those are further rows here.)

use crate::pg::call::args::Args;
use pg_fence_rules::Token;
use pgrx::{pg_sys, PgMemoryContexts};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Returns true if the call is a part of the SELECT that the client itself has sent, and not of what a function or a
/// procedure does: those run within SPI, or in an executor of their own.
pub fn is_of_client_s_select(args: &Args) -> bool {
    // SAFETY: a call's function is known, and the portal that runs lives as long as the call. Where SPI is in use, no
    // relation of that name is registered with it, so nothing changes.
    unsafe {
        let portal = pg_sys::ActivePortal.as_ref();
        let select = portal.and_then(|portal| portal.queryDesc.as_ref());
        let query = select.and_then(|select| select.estate.as_ref());
        query.is_some_and(|query| query.es_query_cxt == (*(*args.raw()).flinfo).fn_mcxt)
            && pg_sys::SPI_unregister_relation(c"".as_ptr()) == pg_sys::SPI_ERROR_UNCONNECTED
    }
}

/// How many answers are remembered at most: a row is mostly repeated at once, so the latest do.
const MOST_ANSWERS: usize = 1000;

/// The memory of a running query, an expression in it, and what was asked for.
type Key = (usize, usize, Vec<u8>);

thread_local! {
    /// The answers so far. They go with the memory of their query.
    static ANSWERED: RefCell<BTreeMap<Key, Token>> = const { RefCell::new(BTreeMap::new()) };
}

/// One call, as part of a query.
#[derive(Clone, Copy)]
pub struct Evaluation {
    memory: pg_sys::MemoryContext,
    expression: usize,
}

impl Evaluation {
    /// Of this call.
    pub fn of(args: &Args) -> Self {
        // SAFETY: a call's function is known, and lives as long as the call.
        unsafe {
            let function = (*args.raw()).flinfo;
            Evaluation { memory: (*function).fn_mcxt, expression: (*function).fn_expr as usize }
        }
    }

    /// The answer of the same expression when this row was evaluated first; None where this is the first time.
    pub fn repeats(&self, asked: &[u8]) -> Option<Token> {
        ANSWERED.with_borrow(|answered| {
            let mut memory = self.memory;
            while !answered.is_empty() && self.expression != 0 {
                // SAFETY: the memory of a call that runs, and what it is part of.
                memory = unsafe { (*memory).parent };
                if memory.is_null() {
                    break;
                }
                let key = (memory as usize, self.expression, asked.to_vec());
                if let Some(token) = answered.get(&key) {
                    return Some(*token);
                }
            }
            None
        })
    }

    /// Remembers the answer for as long as the query runs; after None, the next evaluation finds out by itself.
    pub fn answers(&self, asked: Vec<u8>, token: Option<Token>) {
        let memory = self.memory as usize;
        let key = (memory, self.expression, asked);
        ANSWERED.with_borrow_mut(|answered| {
            let Some(token) = token.filter(|_| self.expression != 0) else {
                answered.remove(&key);
                return;
            };
            if answered.len() >= MOST_ANSWERS {
                answered.clear();
            }
            let others = answered.range((memory, 0, Vec::new())..).next();
            if others.is_none_or(|(other, _)| other.0 != memory) {
                PgMemoryContexts::For(self.memory).leak_and_drop_on_delete(Forgotten(memory));
            }
            answered.insert(key, token);
        });
    }
}

/// Goes with the memory of a query, and its answers with it.
struct Forgotten(usize);

impl Drop for Forgotten {
    fn drop(&mut self) {
        ANSWERED.with_borrow_mut(|answered| answered.retain(|key, _| key.0 != self.0));
    }
}
