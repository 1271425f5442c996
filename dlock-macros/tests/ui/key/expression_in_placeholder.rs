use dlock::key;

enum Kind {
    Order,
}

fn id() -> u64 {
    7
}

fn main() {
    let (a, b) = (1, 2);
    let _ = key!("order:{a + b}");
    let _ = key!("order:{id()}");
    let _ = key!("order:{Kind::Order}");
    let name = "ann";
    let _ = key!("user:{name.to_uppercase():>8}");
}
