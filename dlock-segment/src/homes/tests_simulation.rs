//! Homes under a seeded simulation: processes buy, bring units, level, restock and give back,
//! and die between any two steps; answers are lost, and homes are away for a while. After
//! every step the invariants hold, and every "sold out" is proven by the history.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use dlock::Key;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::{Homes, Refilled, Site};
use crate::error::{Error, Result};
use crate::planted_bug::{Bug, PlantedBug};
use crate::store::home::Home;
use crate::store::{
    Answer, Call, Change, Counts, Cursor, Durability, InventoryId, JournalEntry, Page, Request,
    Settings, Store, Terms, View,
};

/// The homes, what happens to calls, and the history.
struct World {
    state: Mutex<State>,
    /// At the end nothing fails any more.
    is_calm: AtomicBool,
}

struct State {
    homes: Vec<Home>,
    random: StdRng,
    now: u64,
    /// Until when each home is away.
    away: Vec<u64>,
    /// What was available or in transit after each step.
    totals: Vec<u64>,
    faults: Vec<String>,
}

const HOMES: usize = 3;
const STOCK: u64 = 12;

impl State {
    fn views(&self) -> Vec<View> {
        self.homes.iter().map(|home| home.view(self.now)).collect()
    }

    /// Checks the invariants after a step.
    fn check(&mut self) {
        let views = self.views();
        let (mut free, mut sent, mut received) = (0, 0, 0);
        for (home, view) in views.iter().enumerate() {
            let View { initial, restocked, available, reserved, sold, written_off, .. } = *view;
            let here = available + reserved + sold + written_off + view.sent;
            if initial + restocked + view.received != here {
                self.faults.push(format!("I1: home {home} {view:?}"));
            }
            free += available;
            sent += view.sent;
            received += view.received;
        }
        if received > sent {
            self.faults.push(format!("I2: received {received}, sent {sent}"));
        }
        self.totals.push(free + sent.saturating_sub(received));
    }
}

/// Is pending once, so that another task may have its turn.
#[derive(Default)]
struct Turn(bool);

impl Future for Turn {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        match std::mem::replace(&mut self.0, true) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }
}

fn number(inventory: &InventoryId) -> usize {
    inventory.key.as_str().trim_start_matches("home").parse().expect("a home")
}

fn unavailable<T>() -> Result<T> {
    let kind = dlock::ErrorKind::Unavailable;
    Err(Error::Store(dlock::Error::new(kind, dlock::Operation::Inventory)))
}

impl World {
    /// One call: it may fail before it is applied, and its answer may be lost.
    async fn call<T>(&self, home: usize, work: impl FnOnce(&mut Home, u64) -> T) -> Result<T> {
        Turn::default().await;
        let calm = self.is_calm.load(Ordering::Relaxed);
        let answer = {
            let state = &mut *self.state.lock();
            state.now += 1;
            if !calm && state.random.random_ratio(1, 200) {
                state.away[home] = state.now + 40;
            }
            if !calm && state.away[home] > state.now {
                return unavailable();
            }
            let answer = work(&mut state.homes[home], state.now);
            state.check();
            (calm || !state.random.random_ratio(1, 25)).then_some(answer)
        };
        Turn::default().await;
        answer.ok_or(Error::Unknown(None))
    }
}

impl Store for World {
    fn apply_from<'a>(
        &'a self,
        inventory: &'a InventoryId,
        _start: u32,
        batch: &'a [Request],
    ) -> Call<'a, (View, Vec<Answer>)> {
        Box::pin(self.call(number(inventory), |home, now| home.apply_batch(now, 0, batch)))
    }

    fn change<'a>(&'a self, inventory: &'a InventoryId, change: Change) -> Call<'a, View> {
        Box::pin(self.call(number(inventory), move |home, now| {
            home.change(now, change);
            home.view(now)
        }))
    }

    fn create<'a>(&'a self, _: &'a Key, _: &'a Terms) -> Call<'a, View> {
        unimplemented!("homes are there from the start")
    }
    fn open<'a>(&'a self, _: &'a InventoryId) -> Call<'a, View> {
        unimplemented!()
    }
    fn view<'a>(&'a self, _: &'a InventoryId) -> Call<'a, View> {
        unimplemented!()
    }
    fn remove<'a>(&'a self, _: &'a InventoryId) -> Call<'a, bool> {
        unimplemented!()
    }
    fn counts<'a>(&'a self, _: &'a InventoryId) -> Call<'a, (View, Vec<Counts>)> {
        unimplemented!()
    }
    fn sizes<'a>(&'a self, _: &'a InventoryId) -> Call<'a, Vec<u32>> {
        unimplemented!()
    }
    fn records<'a>(&'a self, _: &'a InventoryId, _: Cursor) -> Call<'a, Page> {
        unimplemented!()
    }
    fn journal<'a>(&'a self, _: &'a InventoryId, _: u64, _: usize) -> Call<'a, Vec<JournalEntry>> {
        unimplemented!()
    }
    fn durability(&self) -> Call<'_, Durability> {
        unimplemented!()
    }
}

struct Simulation {
    world: Arc<World>,
    homes: Homes,
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Simulation {
    fn new(seed: u64, bug: Option<Bug>, answers_in_transit: bool) -> Self {
        let terms = Terms {
            stock: STOCK / HOMES as u64,
            segments: 2,
            per_buyer: 0,
            opens_at: 0,
            closes_at: 0,
            retention: 1_000_000,
            journal: 0,
            directory: "several".into(),
        };
        let planted = PlantedBug::with(bug);
        let state = State {
            homes: (0..HOMES as u64).map(|at| Home::new(at + 1, terms.clone(), planted)).collect(),
            random: StdRng::seed_from_u64(seed),
            now: 1_000,
            away: vec![0; HOMES],
            totals: vec![STOCK],
            faults: Vec::new(),
        };
        let world = Arc::new(World { state: Mutex::new(state), is_calm: AtomicBool::new(false) });
        let site = |home: usize| {
            let key = Key::new(format!("home{home}")).expect("a key");
            Site { store: world.clone(), id: InventoryId { key, birth: 0 }, dlock: None }
        };
        let mut homes = Homes::new((0..HOMES).map(site).collect());
        homes.answers_in_transit = answers_in_transit;
        Simulation { world, homes }
    }

    fn random(&self, below: u64) -> u64 {
        self.world.state.lock().random.random_range(0..below)
    }

    fn task(&self, number: u64) -> Task {
        let (world, homes) = (self.world.clone(), self.homes.clone());
        let home = self.random(HOMES as u64) as usize;
        let quantity = 1 + self.random(4);
        match self.random(10) {
            0..=6 => Box::pin(async move {
                buy(&world, &homes, home, quantity, &format!("o{number}")).await;
            }),
            7 => Box::pin(async move {
                let operation = Some(format!("s{number}").into());
                let _ =
                    homes.sites[home].apply(vec![Request::Restock { quantity, operation }]).await;
            }),
            8 => Box::pin(async move {
                let _ = homes.level(&[1.0; HOMES], true).await;
            }),
            _ => Box::pin(async move {
                let of = format!("o{}", number.saturating_sub(quantity)).into();
                let operation = format!("f{number}").into();
                let refund =
                    Request::Refund { of, quantity: 0, operation, damaged: false, receipt: None };
                let _ = homes.sites[home].apply(vec![refund]).await;
                let settings = Settings { version: number, per_buyer: 0, ..Settings::default() };
                let settings = Settings { retention: 1_000_000, ..settings };
                let _ = homes.sites[home].change(Change::Settings(settings)).await;
            }),
        }
    }

    /// Runs tasks in any order; some of them die.
    fn run(self) -> Vec<String> {
        let mut tasks: Vec<Task> = Vec::new();
        let mut cx = Context::from_waker(Waker::noop());
        let mut begun = 0;
        while begun < 60 || !tasks.is_empty() {
            if begun < 60 && (tasks.len() < 2 || self.random(12) == 0) {
                begun += 1;
                tasks.push(self.task(begun));
                continue;
            }
            let at = self.random(tasks.len() as u64) as usize;
            if self.random(40) == 0 || tasks[at].as_mut().poll(&mut cx).is_ready() {
                drop(tasks.swap_remove(at)); // done, or its process died here
            }
        }
        self.world.is_calm.store(true, Ordering::Relaxed);
        // Everything that is left can still be bought, at any home.
        let home = self.random(HOMES as u64) as usize;
        let (world, homes) = (self.world.clone(), self.homes.clone());
        let mut rest: Task = Box::pin(async move {
            for number in 0..10_000 {
                if !buy(&world, &homes, home, 1, &format!("rest{number}")).await {
                    return;
                }
            }
        });
        while rest.as_mut().poll(&mut cx).is_pending() {}
        let mut state = self.world.state.lock();
        let sum = super::whole(&state.views());
        if sum.sold + sum.written_off != sum.initial + sum.restocked {
            state.faults.push(format!("units are left that nobody can buy: {sum:?}"));
        }
        let versions: Vec<u64> = state.views().iter().map(|view| view.version).collect();
        if versions.iter().any(|version| *version != versions[0]) {
            state.faults.push(format!("the settings were not spread: {versions:?}"));
        }
        std::mem::take(&mut state.faults)
    }
}

/// Buys as an inventory does. Returns whether it got units.
async fn buy(world: &World, homes: &Homes, home: usize, quantity: u64, id: &str) -> bool {
    let since = world.state.lock().totals.len() - 1;
    for _ in 0..50 {
        let request = Request::Deduct { quantity, operation: Some(id.into()), buyer: None };
        match homes.sites[home].apply(vec![request]).await {
            Ok((_, answers)) if matches!(answers[..], [Answer::SoldOut { .. }]) => {}
            Ok(_) => return true,
            Err(Error::Unknown(_)) => continue,
            Err(_) => return false,
        }
        match homes.refill(home, quantity).await {
            Ok(Refilled::Units) => {}
            Ok(Refilled::SoldOut(_)) => {
                let state = &mut *world.state.lock();
                if state.totals[since..].iter().all(|total| *total >= quantity) {
                    let least = state.totals[since..].iter().min();
                    state.faults.push(format!("I4: sold out for {quantity}, there were {least:?}"));
                }
                return false;
            }
            Err(_) => return false,
        }
    }
    false
}

fn seeds() -> u64 {
    std::env::var("DLOCK_TEST_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(300)
}

#[test]
fn homes_keep_their_promises_whoever_dies() {
    for seed in 0..seeds() {
        let faults = Simulation::new(seed, None, false).run();
        assert!(faults.is_empty(), "seed {seed}: {faults:#?}");
    }
}

#[test]
fn planted_bugs_of_homes_are_found() {
    let is_found = |bug: Option<Bug>, in_transit: bool, named: &str| {
        (0..300).any(|seed| {
            let faults = Simulation::new(seed, bug, in_transit).run();
            faults.iter().any(|fault| fault.contains(named))
        })
    };
    for bug in Bug::OF_HOMES {
        assert!(is_found(Some(bug), false, "I1"), "{bug:?}");
    }
    assert!(is_found(None, true, "I4"), "sold out while units are in transit");
}
