//! What keeps all leases of a [`Fence`](crate::Fence): one task with one connection tries, renews and releases, another
//! one watches the deadlines. Both are there while something is held or tried.

use crate::clock::{self, Moment};
use crate::connected::Connected;
use crate::error::{Error, Reason};
use crate::hooks::Hooks;
use crate::keeper::Keeper;
use crate::own::{Call, Opener};
use crate::state::Shared;
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};

/// What is kept, and tried. It is shared by a fence, its clones and both tasks.
pub(crate) struct Keeping {
    pub open: Opener,
    pub runtime: Option<Handle>,
    pub hooks: Arc<dyn Hooks>,
    state: Mutex<State>,
    /// There is something to do for the keeper.
    work: Notify,
    /// Other deadlines.
    deadlines: Notify,
}

#[derive(Default)]
pub(crate) struct State {
    last: u64,
    pub leases: BTreeMap<u64, Arc<Shared>>,
    pub tries: VecDeque<Try>,
    /// The connection of one that has waited, for the keeper.
    pub spare: Option<Connected>,
    pub is_keeping: bool,
    is_watching: bool,
}

/// An acquire that does not wait.
pub(crate) struct Try {
    pub shared: Arc<Shared>,
    pub call: Call,
    /// What finds a grant whose answer was lost.
    pub again: Option<Call>,
    pub answer: oneshot::Sender<Result<bool, Error>>,
}

impl Keeping {
    pub fn new(open: Opener, runtime: Option<Handle>, hooks: Arc<dyn Hooks>) -> Keeping {
        let (work, deadlines) = (Notify::new(), Notify::new());
        Keeping { open, runtime, hooks, state: Mutex::default(), work, deadlines }
    }

    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        match &self.runtime {
            Some(runtime) => drop(runtime.spawn(task)),
            None => drop(tokio::spawn(task)),
        }
    }

    pub fn wake(&self) {
        self.work.notify_one();
    }

    pub async fn until_woken(&self) {
        self.work.notified().await;
    }

    pub fn deadlines_have_changed(&self) {
        self.deadlines.notify_one();
    }

    /// Tries it in turn.
    pub fn queue(self: &Arc<Keeping>, one: Try) {
        self.state().tries.push_back(one);
        self.start();
    }

    /// Keeps it from now on, also by that connection.
    pub fn keep(self: &Arc<Keeping>, shared: Arc<Shared>, spare: Option<Connected>) {
        {
            let mut state = self.state();
            state.last += 1;
            let key = state.last;
            state.leases.insert(key, shared);
            state.spare = spare.or(state.spare.take());
        }
        self.start();
    }

    fn start(self: &Arc<Keeping>) {
        let (keeps, watches) = {
            let mut state = self.state();
            let keeps = !std::mem::replace(&mut state.is_keeping, true);
            // A task of its own: it does not matter where the other one hangs, or whether it has died.
            let is_wanted = self.hooks.watches() && !state.leases.is_empty();
            let watches = is_wanted && !std::mem::replace(&mut state.is_watching, true);
            (keeps, watches)
        };
        self.work.notify_one();
        self.deadlines.notify_one();
        if watches {
            let watch = Watch { keeping: self.clone(), has_ended: false };
            self.spawn(watch.watch());
        }
        if keeps {
            self.spawn(Keeper::new(self.clone()).keep());
        }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next deadline, once those that have passed are told. None where nothing is held.
    fn tell_deadlines(&self) -> Option<Moment> {
        let leases: Vec<_> = self.state().leases.values().cloned().collect();
        for lease in leases.iter().filter(|lease| lease.deadline().has_passed()) {
            lease.lose(Reason::Deadline, None);
        }
        let mut state = self.state();
        let next = state
            .leases
            .values()
            .filter(|lease| lease.is_held())
            .map(|lease| lease.deadline())
            .min();
        state.is_watching = next.is_some();
        next
    }
}

impl State {
    pub fn smallest_ttl(&self) -> Option<Duration> {
        self.leases.values().map(|lease| lease.terms.ttl).min()
    }
}

// The watch

/// Tells a loss at its deadline, whatever the keeper does.
struct Watch {
    keeping: Arc<Keeping>,
    has_ended: bool,
}

impl Watch {
    async fn watch(mut self) {
        while let Some(next) = self.keeping.tell_deadlines() {
            tokio::select! {
                () = clock::sleep_until(next) => {}
                () = self.keeping.deadlines.notified() => {}
            }
        }
        self.has_ended = true;
    }
}

impl Drop for Watch {
    /// Its runtime may be gone.
    fn drop(&mut self) {
        if !self.has_ended {
            self.keeping.state().is_watching = false;
        }
    }
}
