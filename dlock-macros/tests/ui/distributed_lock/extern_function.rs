use dlock::distributed_lock;

#[distributed_lock(key = "order:{order_id}")]
extern "C" fn pay(order_id: u64) -> u64 {
    order_id
}

fn main() {
    let _ = pay(7);
}
