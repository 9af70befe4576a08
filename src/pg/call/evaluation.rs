//! Repeated evaluations of the same row by one query.
//!
//! At READ COMMITTED a row that another transaction has changed is evaluated again (EvalPlanQual): the query's
//! expressions are run in a second state, whose memory context is a child of the query's. So the same expression called
//! in a child context is a repetition; called in the same context, it is for another row. (Two repetitions are not
//! recognized, and count as other rows: that of an expression that the planner has copied to a second place, and that of
//! the actions of a MERGE, which run in the query's own context.)

use crate::pg::call::args::Args;
use pg_fence_rules::Token;
use pgrx::{PgMemoryContexts, pg_sys};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Returns true if the call belongs to the SELECT that the client itself sent, and not to a statement of a function or
/// procedure, which runs within SPI or in an executor of its own.
pub fn is_in_client_select(args: &Args) -> bool {
    // SAFETY: a call's function is known, and the running portal lives as long as the call. Within SPI, no relation of
    // that name is registered, so nothing changes.
    unsafe {
        let portal = pg_sys::ActivePortal.as_ref();
        let select = portal.and_then(|portal| portal.queryDesc.as_ref());
        let query = select.and_then(|select| select.estate.as_ref());
        query.is_some_and(|query| query.es_query_cxt == (*(*args.raw()).flinfo).fn_mcxt)
            && pg_sys::SPI_unregister_relation(c"".as_ptr()) == pg_sys::SPI_ERROR_UNCONNECTED
    }
}

/// The number of answers to remember. A row is usually repeated at once, so the latest are enough.
const MAX_ANSWERS: usize = 1000;

/// The memory context of a running query, an expression in it, and the requested names.
type Key = (usize, usize, Vec<u8>);

thread_local! {
    /// The answers so far, which are dropped with the memory context of their query.
    static ANSWERED: RefCell<BTreeMap<Key, Token>> = const { RefCell::new(BTreeMap::new()) };
}

/// One call of an expression in a query.
pub struct Evaluation(Key);

impl Evaluation {
    /// The evaluation to which this call belongs. Names never contain NUL, so it separates them.
    pub fn of<'n>(args: &Args, names: impl Iterator<Item = &'n [u8]>) -> Self {
        // SAFETY: a call's function is known, and lives as long as the call.
        let function = unsafe { &*(*args.raw()).flinfo };
        let names = names.collect::<Vec<_>>().join(&0);
        Evaluation((function.fn_mcxt as usize, function.fn_expr as usize, names))
    }

    /// The answer that the same expression gave when this row was evaluated before; `None` for the first evaluation.
    pub fn earlier_answer(&self) -> Option<Token> {
        ANSWERED.with_borrow(|answered| {
            let (memory, expression, ref names) = self.0;
            let mut memory = memory as pg_sys::MemoryContext;
            while !answered.is_empty() && expression != 0 {
                // SAFETY: the memory context of a running call, and its parents.
                memory = unsafe { (*memory).parent };
                if memory.is_null() {
                    break;
                }
                if let Some(token) = answered.get(&(memory as usize, expression, names.clone())) {
                    return Some(*token);
                }
            }
            None
        })
    }

    /// Remembers the answer until the query ends. For `None` nothing is remembered, so the next evaluation decides
    /// again.
    pub fn answers(self, token: Option<Token>) {
        let (memory, expression, _) = self.0;
        ANSWERED.with_borrow_mut(|answered| {
            let Some(token) = token.filter(|_| expression != 0) else {
                answered.remove(&self.0);
                return;
            };
            if answered.len() >= MAX_ANSWERS {
                answered.clear();
            }
            let others = answered.range((memory, 0, Vec::new())..).next();
            if others.is_none_or(|(other, _)| other.0 != memory) {
                let mut memory = PgMemoryContexts::For(memory as pg_sys::MemoryContext);
                memory.leak_and_drop_on_delete(ForgetOnDrop(self.0.0));
            }
            answered.insert(self.0, token);
        });
    }
}

/// Dropped with the memory context of a query, to drop the query's answers.
struct ForgetOnDrop(usize);

impl Drop for ForgetOnDrop {
    fn drop(&mut self) {
        ANSWERED.with_borrow_mut(|answered| answered.retain(|key, _| key.0 != self.0));
    }
}
