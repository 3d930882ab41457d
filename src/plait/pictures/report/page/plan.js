'use strict';

// Pointing at a rank in the picture of the plan shows which shards it holds; a click keeps it.

for (const holding of document.querySelectorAll('.holding')) {
  const ranks = [...holding.querySelectorAll('.rank')], place = holding.querySelector('.place');
  const parts = [...holding.querySelectorAll('.shard, .interval')];
  let kept = null;

  const same = (one, other, axes) => axes.every((axis) => one.dataset[axis] === other.dataset[axis]);
  const listed = (found) => found.map((one) => one.dataset.rank).slice(0, 12).join(', ') + (found.length > 12 ? ' …' : '');

  function show(rank) {
    holding.classList.toggle('chosen', Boolean(rank));
    for (const one of ranks) {
      const close = rank && same(one, rank, ['pp', 'replicate', 'shard', 'cp']);
      one.classList.toggle('own', one === rank);
      one.classList.toggle('peer', Boolean(close) && one !== rank);
    }
    for (const part of parts) {
      const {tp, shard, cp} = part.dataset;
      const owns = rank && (tp === 'all' || tp === rank.dataset.tp || part.dataset.whole) &&
        (shard === undefined || (shard === rank.dataset.shard && cp === rank.dataset.cp));
      part.classList.toggle('held', Boolean(owns));
    }
    place.textContent = rank ? told(rank) : '';
  }

  function told(rank) {
    const axes = ['pp', 'replicate', 'shard', 'cp', 'tp'];
    const peers = axes.flatMap((axis) => {
      const alike = ranks.filter((one) => same(one, rank, axes.filter((other) => other !== axis)));
      return alike.length > 1 ? [`along ${axis} with ranks ${listed(alike)}`] : [];
    });
    return `rank ${rank.dataset.rank}: ${peers.join('; ') || 'alone'}`;
  }

  holding.addEventListener('pointerover', ({target}) => {
    if (target.closest('.rank')) show(target.closest('.rank'));
    else if (target.closest('svg')) show(kept);
  });
  holding.addEventListener('pointerleave', () => show(kept));
  holding.addEventListener('click', ({target}) => {
    const rank = target.closest('.rank');
    kept = rank === kept ? null : rank;
    show(kept);
  });
}
