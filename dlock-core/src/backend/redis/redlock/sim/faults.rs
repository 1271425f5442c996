//! What goes wrong in the simulation besides the network.

use rand::RngExt as _;

use super::Simulation;
use super::events::Event;

impl Simulation {
    /// Injects a fault, and plans the next one.
    pub(super) fn fault(&mut self) {
        if !self.calm {
            let node = self.random.random_range(0..self.nodes.len());
            let client = self.random.random_range(0..self.clients.len());
            let now = self.now;
            let it = &mut self.nodes[node];
            let clock = it.clock.at(now);
            match self.random.random_range(0..60) {
                0 => {
                    it.node.loses_data(clock, None);
                    it.boot += 1;
                }
                1 => {
                    let saved = it.saved.clone();
                    it.node.loses_data(clock, Some(&saved));
                    it.boot += 1;
                }
                2 => it.node.loses_data(clock, None), // emptied
                3..10 => it.saved = it.node.clone(),
                10..20 => it.paused_until = now + self.random.random_range(10_000..2_000_000),
                20..30 => {
                    let long = self.random.random_range(10_000..2_000_000);
                    self.clients[client].paused_until = now + long;
                }
                _ => {
                    let long = self.random.random_range(10_000..2_000_000);
                    self.clients[client].cut_off[node] = now + long;
                }
            }
        }
        let next = self.now + self.random.random_range(20_000..500_000);
        self.at(next, Event::Fault);
    }
}
