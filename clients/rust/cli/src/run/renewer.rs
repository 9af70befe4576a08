//! The process that holds and renews the lease. It has its own connections to the server.
//!
//! The renewer blocks signals and is in no terminal's process group, so that it renews the lease as long as the command
//! runs, whatever happens to the supervisor. If the supervisor is frozen or dead, the renewer ends the command.

use super::adopted_lease::AdoptedLease;
use super::messages::{Event, EventSender, Order, receive_orders};
use super::termination::{CLEANUP_TIMEOUT, terminate};
use super::times::Times;
use super::{Options, RUN_ID_VARIABLE};
use crate::clock::Moment;
use crate::connection::Server;
use crate::failure::{Failure, Result, options_refused, status};
use crate::{logger, planted, say};
use nix::sys::prctl::set_name;
use nix::sys::signal::Signal;
use nix::unistd::gethostname;
use pg_fence_client::{Error, EventKind, Fence, Lease, LeaseRequest, WaitsFor};
use std::io::{IsTerminal, stderr};
use std::mem::replace;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Builder;
use tokio::sync::mpsc;
use tokio_postgres::types::Type;

/// Tokio's timers stand still while the machine sleeps, so each wait reads the clock again after this time.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The pause between two attempts to connect, while the database is not available.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Acquires the lease and renews it until the command has ended. Failures are reported to the supervisor.
pub fn renew(options: Options, times: Times, server: Server) -> Result<u8> {
    logger::start();
    // Otherwise `ps` shows `exe`, the name of the file in /proc by which the process was started.
    let _ = set_name(c"pg_fence");
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::system("the runtime", error))?;
    runtime.block_on(async {
        let events = Arc::new(EventSender::start());
        let renewer = Renewer {
            options,
            times,
            server,
            orders: receive_orders(),
            group: None,
            has_failed: false,
            events: events.clone(),
        };
        renewer.run().await;
        events.flush(CLEANUP_TIMEOUT);
    });
    Ok(0)
}

/// Returns the id of this run, which no other run on this machine has.
fn run_id() -> String {
    std::env::var(RUN_ID_VARIABLE).unwrap_or_default()
}

struct Renewer {
    options: Options,
    times: Times,
    server: Server,
    /// The supervisor's orders. The channel ends if the supervisor dies.
    orders: mpsc::UnboundedReceiver<Order>,
    /// The process group of the command.
    group: Option<i32>,
    /// True if the command ended by itself with a status other than 0.
    has_failed: bool,
    events: Arc<EventSender>,
}

impl Renewer {
    async fn run(mut self) {
        let fence = self.fence();
        if let Err(Failure { status, message }) = self.acquire_and_hold(&fence).await {
            self.events.send(Event::Failed { status, message });
        }
        if self.has_failed {
            self.report_refused_options().await;
        }
    }

    async fn acquire_and_hold(&mut self, fence: &Fence) -> Result<()> {
        if let Some(token) = self.options.adopt {
            return self.hold_adopted(token).await;
        }
        if let Some(lease) = self.acquire(fence).await? {
            self.hold(lease).await;
        }
        Ok(())
    }

    /// Makes the fence, whose renewals are reported to the supervisor from the fence's thread.
    fn fence(&self) -> Fence {
        let events = self.events.clone();
        self.server.fence().renew_within(self.times.attempt_timeout()).on_event(move |event| {
            if event.kind == EventKind::Renewed {
                events.send(Event::Renewed { deadline: Moment::now() + event.remaining });
            }
        })
    }

    // Before the lease is held.

    /// Acquires the lease. Returns None if the supervisor does not want the lease any more.
    async fn acquire(&mut self, fence: &Fence) -> Result<Option<Lease>> {
        let until = Moment::now() + self.options.wait;
        let request = self.request(fence);
        // A try without a wait is first: it needs only the shared connection, returns a permanent error at once, and
        // finds the holder that a wait is for.
        let mut is_tried = false;
        let is_reported = self.options.quiet || !stderr().is_terminal();
        // The last message: the same failure is logged once.
        let mut reported = String::new();
        let granted = loop {
            let wait = if is_tried { until.remaining() } else { Duration::ZERO };
            let granted = tokio::select! {
                granted = request.clone().wait(wait).acquire() => granted,
                // An order to release, or the death of the supervisor: nobody wants the lease any more.
                _ = self.order() => break Ok(None),
            };
            let failure = match granted {
                Ok(lease) => break Ok(Some(lease)),
                Err(Error::LeaseTaken { holder, remaining, waits_for, .. }) => {
                    let is_over = replace(&mut is_tried, true) || until.has_passed();
                    if !is_over && is_reported {
                        continue;
                    }
                    // If a guard outlives the lease, the message names its process instead of the holder.
                    let holder = holder.filter(|_| waits_for != Some(WaitsFor::Guard));
                    let message = self.taken(holder, remaining).await;
                    if is_over {
                        break Err(Failure::new(status::TAKEN, message));
                    }
                    say(&format!("waiting: {message}"));
                    continue;
                }
                Err(error) => Failure::of_client(&error),
            };
            if !failure.is_transient() || until.has_passed() {
                break Err(failure);
            }
            if failure.message != reported {
                log::warn!("{failure}: it is tried again");
                reported = failure.message;
            }
            tokio::time::sleep(RETRY_INTERVAL.min(until.remaining())).await;
        };
        if let Ok(None) = granted {
            // A grant that comes after that is released.
            let _ = tokio::time::timeout(CLEANUP_TIMEOUT, fence.close()).await;
        }
        granted
    }

    /// Returns the message for a lease that is taken, with its holder if that is known.
    async fn taken(&self, holder: Option<String>, remaining: Option<Duration>) -> String {
        let plain = format!("{} is taken", self.options.lease());
        let why = match (holder, remaining) {
            _ if self.options.quiet => None,
            (Some(holder), Some(left)) => {
                let left = Duration::from_secs(left.as_secs().max(1));
                Some(format!("held by {holder}, for {} more", humantime::format_duration(left)))
            }
            _ => blocking_transaction(&self.server, &self.options.names, CLEANUP_TIMEOUT).await,
        };
        why.map_or_else(|| plain.clone(), |why| format!("{plain}: {why}"))
    }

    fn request(&self, fence: &Fence) -> LeaseRequest {
        let options = &self.options;
        let mut request = fence.lease(options.names.clone());
        request = request.ttl(self.times.ttl).holder(self.holder());
        let is_alone = !options.shared && options.slots.is_none() && options.names.len() == 1;
        if is_alone && options.holder.is_none() {
            // If the answer to a grant was lost with its connection, the next try takes the grant over: no other run
            // has this holder.
            request = request.reclaim(self.holder());
        }
        if options.shared {
            request = request.shared();
        }
        if let Some(slots) = options.slots {
            request = request.slots(slots);
        }
        if options.session {
            request = request.session();
        }
        if let Some(at_least) = options.at_least {
            // It distinguishes a lease that is left to expire from a lease whose holder has died.
            request = request.metadata(serde_json::json!({ "at_least": at_least.as_secs_f64() }));
        }
        request
    }

    fn holder(&self) -> String {
        let unique = || {
            let host = gethostname().unwrap_or_default();
            format!("{}/{}", host.to_string_lossy(), run_id())
        };
        self.options.holder.clone().unwrap_or_else(unique)
    }

    // While the lease is held.

    /// Returns the supervisor's next order, or None if the supervisor has died. `Started` is recorded, not returned.
    async fn order(&mut self) -> Option<Order> {
        loop {
            match self.orders.recv().await {
                Some(Order::Started { group }) => self.group = Some(group),
                order => {
                    if let Some(Order::Release { has_failed }) = order {
                        self.has_failed = has_failed;
                    }
                    return order;
                }
            }
        }
    }

    async fn hold(&mut self, lease: Lease) {
        self.events
            .send(Event::Granted { token: lease.token(), deadline: Some(deadline_of(&lease)) });
        let since = Moment::now();
        let watched = lease.clone();
        let mut lost = std::pin::pin!(watched.lost());
        let order = loop {
            let deadline = deadline_of(&lease);
            let enforce_at = self.times.enforce_at(deadline);
            tokio::select! {
                biased;
                order = self.order() => break order,
                loss = &mut lost => {
                    if loss.is_some() {
                        self.events.send(Event::Lost);
                    }
                    let by = Moment::now() + self.times.takeover_delay();
                    return self.await_termination(by.min(enforce_at)).await;
                }
                // The client reports a loss at the deadline, which is too late to end the command before it. The lease
                // may have been renewed since.
                () = sleep_until(enforce_at), if !planted::NO_DEADLINE => {
                    if deadline_of(&lease) <= deadline {
                        self.events.send(Event::Lost);
                        return self.await_termination(enforce_at).await;
                    }
                }
            }
        };
        match order {
            // A drop would release the lease.
            Some(Order::LetExpire) => return std::mem::forget(lease),
            Some(_) => {}
            // The supervisor is dead.
            None => {
                let kill_at = self.times.kill_at(deadline_of(&lease));
                let kill_at = kill_at.min(Moment::now() + self.times.grace);
                if !self.end(Signal::SIGTERM, kill_at).await {
                    return std::mem::forget(lease);
                }
            }
        }
        let left = self.options.at_least.map(|least| (since + least).remaining());
        match left.filter(|left| !left.is_zero()) {
            None => drop(lease.release().await),
            Some(left) => self.let_expire(lease, left).await,
        }
    }

    /// Leaves the lease to expire after `left`.
    async fn let_expire(&self, lease: Lease, left: Duration) {
        let renew = self.server.function("lease_renew(n, $2, $3::text::interval)");
        let sql = format!("SELECT {renew} FROM unnest($1::text[]) AS n");
        let renewed = async {
            let connected = self.server.connect().await?;
            let (names, token) = (lease.names().to_vec(), lease.token());
            let left = format!("{} microseconds", left.as_micros());
            let arguments: crate::views::Arguments =
                &[(&names, Type::TEXT_ARRAY), (&token, Type::INT8), (&left, Type::TEXT)];
            connected.query_typed(&sql, arguments).await.map_err(Failure::of_driver)
        };
        match tokio::time::timeout(self.times.ttl / 3, renewed).await {
            Ok(Ok(_)) => {}
            Ok(Err(failure)) => log::warn!("the lease ends at its ttl: {failure}"),
            Err(_) => log::warn!("the lease ends at its ttl: the server did not answer in time"),
        }
        std::mem::forget(lease);
    }

    // A lease that another service grants.

    /// Adopts the token again and again. Nothing is released at the end: the service that grants the token ends it.
    async fn hold_adopted(&mut self, token: i64) -> Result<()> {
        let (name, server) = (self.options.names[0].clone(), self.server.clone());
        let (limit, holder) = (self.times.ttl / 3, self.holder());
        let mut lease = AdoptedLease { server, connected: None, name, token, holder };
        if !lease.adopt(self.options.wait, limit).await? {
            let taken = format!("{} is guarded by an older token", lease.name);
            return Err(Failure::new(status::TAKEN, taken));
        }
        self.events.send(Event::Granted { token, deadline: None });
        loop {
            let look_at = Moment::now() + limit;
            tokio::select! {
                biased;
                order = self.order() => {
                    if order.is_none() {
                        self.end(Signal::SIGTERM, Moment::now() + self.times.grace).await;
                    }
                    return Ok(());
                }
                () = sleep_until(look_at) => {}
            }
            // After a failover the server has to learn the token again.
            match lease.adopt(Duration::ZERO, limit).await {
                Err(failure) if !failure.is_transient() => {
                    log::warn!("{failure}");
                    self.events.send(Event::Lost);
                    self.await_termination(Moment::now() + self.times.takeover_delay()).await;
                    return Ok(());
                }
                // An unavailable server is no loss: the server checks each write.
                Err(failure) => log::warn!("{failure}"),
                Ok(_) => {}
            }
        }
    }

    /// Reports whether a connection is refused because of PGOPTIONS. The command may have failed for that reason, and
    /// its own error does not say where the options come from.
    async fn report_refused_options(&self) {
        // Any token serves, because nothing is written.
        let Some(options) = self.options.pgoptions(1) else { return };
        let tried = tokio::time::timeout(CLEANUP_TIMEOUT, self.server.try_options(&options)).await;
        if let Ok(Err(error)) = tried
            && let Some(tries) = options_refused(&error)
        {
            say(&format!(
                "PGOPTIONS is refused here ({tries}): take --no-pgoptions, and let the program SET LOCAL pg_fence.token in \
                 each transaction"
            ));
        }
    }

    /// Waits until the supervisor has ended the command, and kills the command if that has not happened by `by`: the
    /// supervisor is frozen then.
    async fn await_termination(&mut self, by: Moment) {
        let order = tokio::select! {
            biased;
            order = self.order() => order,
            () = sleep_until(by) => None,
        };
        if order.is_none() {
            self.end(Signal::SIGKILL, by).await;
        }
    }

    /// Ends the command. Returns true if no process is left.
    async fn end(&self, first: Signal, kill_at: Moment) -> bool {
        terminate(&run_id(), self.group, first, kill_at).await
    }
}

async fn sleep_until(moment: Moment) {
    while !moment.has_passed() {
        tokio::time::sleep(moment.remaining().min(CHECK_INTERVAL)).await;
    }
}

/// Returns the deadline of the lease. The clock is read first, so a freeze in between makes the deadline earlier, and
/// never later.
fn deadline_of(lease: &Lease) -> Moment {
    let now = Moment::now();
    now + lease.remaining()
}

/// Returns the open transaction that blocks a lease without a holder, or None if it is not visible.
async fn blocking_transaction(
    server: &Server,
    names: &[String],
    limit: Duration,
) -> Option<String> {
    let sql = "SELECT array_to_string(blocking_pids, ', '), state, coalesce(holder, '')
                 FROM fence.leases WHERE name = ANY ($1) AND blocking_pids <> '{}' LIMIT 1";
    let names = names.to_vec();
    let found = async {
        let connected = server.connect().await.ok()?;
        let rows = connected.query_typed(sql, &[(&names, Type::TEXT_ARRAY)]).await.ok()?;
        let text = |at| rows.first()?.try_get::<_, String>(at).ok();
        let (pids, state, holder) = (text(0)?, text(1)?, text(2)?);
        Some(format!("kept from all by an open transaction (pid {pids}; {state}, {holder})"))
    };
    tokio::time::timeout(limit, found).await.ok()?
}
