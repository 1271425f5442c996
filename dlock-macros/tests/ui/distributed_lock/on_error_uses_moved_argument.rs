use dlock::distributed_lock;

#[distributed_lock(key = "order:{order}", on_error = |_| order.len())]
async fn pay(order: String) -> usize {
    order.len()
}

fn main() {
    let _ = pay(String::new());
}
